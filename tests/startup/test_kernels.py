"""A plan's C++ is known before torch is there: what is compiled ahead is what the engine loads, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from engine import native
from engine.assembly.assemble import assemble
from engine.assembly.bind import describe_model
from engine.assembly.errors import AssemblyError
from engine.kernels.cpu import elementwise, expert_ops, head_ops, layer_ops, recurrent, row_ops
from engine.kernels.cpu.linear import float_linear, integer_linear
from engine.native import Source, ahead, calls
from engine.native.shared_library import THREAD_POOL
from engine.sampling import choose_native
from engine.sampling.sources import MASK
from engine.startup import kernels
from engine.startup.build import build_engine
from engine_plugins.attention_kernel.cpu import kernel as cpu_attention
from tests.native import needs_compiler
from tests.selection import few

from ..laws.drafted import COMMON

pytestmark = needs_compiler

LOADERS: tuple[Any, ...] = (
    *(module.kernels for module in (elementwise, expert_ops, head_ops, layer_ops, recurrent, row_ops)),
    *(float_linear.kernels, integer_linear.kernels, integer_linear.best_instructions, cpu_attention.kernels),
    choose_native.kernels,
)


def begun(plan: Any, monkeypatch: pytest.MonkeyPatch) -> set[Source]:
    found: set[Source] = set()
    monkeypatch.setattr(ahead, "begin", lambda sources: found.update(sources))
    kernels.begin_kernels(plan, describe_model(plan).graph)
    return found


TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "cohere": {},
    "deepseek_v2": {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
        "v_head_dim": 10, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "n_shared_experts": 1,
    },
    "qwen3_moe": {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
    "qwen3_5_text": {
        "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 12, "full_attention_interval": 2,
    },
}  # fmt: skip
"""Nothing beside fused kernels; single ops; heads cut and joined; experts; a recurrent state."""


@pytest.fixture
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {
        "vocab_size": 199, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    path = tmp_path_factory.mktemp(request.param)
    config = AutoConfig.for_model(request.param, **shape | TINY[request.param])
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


FORMATS = (
    ("model.dtype=bfloat16",),
    ("model.dtype=bfloat16", "quantizer=int8", "quantizer.cache=none"),
    ("model.dtype=float32", "quantizer=int4", "quantizer.group_size=32", "quantizer.cache=none"),
    ("model.dtype=float32", "drafter=early_exit", "drafter.layers=1"),
)


@few(4)
@pytest.mark.parametrize(
    ("tiny", "overrides"),
    [*(("llama", overrides) for overrides in FORMATS), *((family, ("model.dtype=float32",)) for family in TINY)],
    indirect=["tiny"],
)
def test_what_is_compiled_ahead_is_what_is_loaded(
    tiny: Path, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = assemble([f"model.path={tiny}", *COMMON, "execution=compile", "scheduler.max_requests=4", *overrides])
    loaded, load = set[Source](), native.load

    def recording(file: Path, functions: Any, macros: tuple[str, ...] = ()) -> Any:
        loaded.add(Source(file, macros))
        return load(file, functions, macros)

    monkeypatch.setattr(native, "load", recording)
    for loader in LOADERS:
        loader.cache_clear()
    build_engine(plan)
    loaded |= {calls.SOURCE, THREAD_POOL, MASK}  # which every program needs, or the first grammar
    assert {source.name for source in begun(plan, monkeypatch)} == {source.name for source in loaded}


def test_torch_is_not_imported_to_know_it() -> None:
    program = (
        "import sys\nfrom engine.assembly.assemble import assemble\nfrom engine.native import ahead\n"
        "from engine.assembly.bind import describe_model\nfrom engine.startup.kernels import begin_kernels\n"
        "ahead.begin = lambda sources: print(len(sources))\n"
        "plan = assemble(['model.path=bundled', 'device=cpu'])\nbegin_kernels(plan, describe_model(plan).graph)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and int(done.stdout) > 0, done.stderr[-3000:]


def test_without_kernels_of_the_core_only_plugins_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = assemble(["model.path=bundled", "device=cpu", "execution=eager", "attention_kernel=cpu"])
    assert {source.file.name for source in begun(eager, monkeypatch)} == {"attention.cpp", "thread_pool.cpp"}


def test_a_plugin_that_cannot_say_what_it_loads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Callable[..., Any]:
        def sources(config: Any, context: Any) -> Any:
            raise RuntimeError("no idea")

        return sources

    plan = assemble(["model.path=bundled", "device=cpu"])
    monkeypatch.setattr("engine_plugins.attention_kernel.cpu.sources.sources", broken("sources"))
    with pytest.raises(AssemblyError, match=r"attention_kernel=cpu .*sources:sources failed: .*no idea"):
        kernels.begin_kernels(plan, describe_model(plan).graph)


def test_what_is_going_on_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = assemble(["model.path=bundled", "device=cpu"])
    monkeypatch.setattr(ahead, "begin", lambda sources: None)
    for count, text in ((0, ""), (1, "compiling 1 kernel for"), (7, "compiling 7 kernels for this processor, once")):
        monkeypatch.setattr(ahead, "unfinished", lambda count=count: count)
        said = kernels.begin_kernels(plan, describe_model(plan).graph)
        assert said.startswith(text) and bool(said) == bool(text)
