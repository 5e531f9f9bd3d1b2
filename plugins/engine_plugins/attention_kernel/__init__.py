"""Attention over the paged cache."""

from __future__ import annotations

from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl
from engine_plugins.attention_kernel.config import beyond_triton
from engine_plugins.devices import only_compiling_cpus


@hookimpl
def engine_attention_kernel() -> list[Provider]:
    return [
        Provider(
            "torch",
            "engine_plugins.attention_kernel.torch_paged:TorchAttention",
            provides=("log_sum_exp",),
            doc="Plain torch on any device; the reference.",
        ),
        Provider(
            "cpu",
            "engine_plugins.attention_kernel.cpu.kernel:CpuAttention",
            provides=("log_sum_exp",),
            unsupported=only_compiling_cpus,
            sources="engine_plugins.attention_kernel.cpu.sources:sources",
            doc="C++ kernels for CPUs, with AMX where there is; built at start-up.",
        ),
        Provider(
            "triton",
            "engine_plugins.attention_kernel.triton.kernel:TritonAttention",
            provides=("capturable", "log_sum_exp"),
            unsupported=beyond_triton,
            doc="Triton kernels for prefill, decode and verification.",
        ),
    ]
