"""An attention kernel, on a small batch of every kind of row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionKernel, LogSumExpAttention, NativeAttention
from engine.contracts.graph import Graph
from engine.contracts.kv_format import KVFormat
from engine.contracts.ops import Attention, SharedAttention
from engine.kernels.checks.tensors import Bounded, tensor_problem, value_problem
from engine.kernels.storage import as_bits
from engine.kernels.torch.reference import paged_attention, paged_attention_lse
from engine.plugin_guard.calls import PluginError, contract_error, name_of, quote
from engine.startup.checks.attention_cases import AttentionCase, AttentionInputs, case_at_start, make_inputs, of_rank

TOLERANCE = {"float32": 0.01, "bfloat16": 0.05, "float16": 0.02}
"""Accepted error, as a share of the largest output, by compute dtype: a wrong mask, scale or row costs more."""


@dataclass(frozen=True, slots=True)
class AttentionCheck:
    """Where a kernel is tried."""

    kernel: AttentionKernel
    kv_format: KVFormat
    dtype: str
    device: str
    block_size: int
    max_len: int
    max_requests: int
    """A kernel may have set aside memory for so many tokens of a row, and rows of a batch."""

    def __call__(self, graph: Graph) -> None:
        """Every kind of attention in the model. Raises :class:`~engine.plugin_guard.calls.PluginError`."""
        ops = {node.op for node in graph.nodes if isinstance(node.op, Attention | SharedAttention)}
        for one in ops:
            op = one if isinstance(one, Attention) else one.attention
            label: object = self.kernel.label(op, self.dtype, self.kv_format)
            if not isinstance(label, str):
                raise contract_error(self.kernel, "label", f"returned {quote(label)}, expected a text")
            if op.soft_cap is not None and not self.kernel.capabilities.soft_cap:
                raise PluginError(f"{name_of(self.kernel)} cannot run this model: its scores are capped (soft_cap)")
            if op.value_dim is not None and not self.kernel.capabilities.latent:
                raise PluginError(f"{name_of(self.kernel)} cannot run this model: its attention is latent")
            if op.sinks and not self.kernel.capabilities.sinks:
                raise PluginError(f"{name_of(self.kernel)} cannot run this model: its softmax has sinks")
            whole = case_at_start(op, self.block_size, self.max_len)
            for first in range(0, len(whole.rows), self.max_requests):
                case = replace(whole, rows=whole.rows[first : first + self.max_requests])
                if isinstance(one, Attention):
                    self._try(case)
                else:
                    size = self.block_size // len(one.shares)
                    self._try_shared(replace(case, block_size=size), len(one.shares), one.index)

    def _try(self, case: AttentionCase) -> None:
        kernel, op = self.kernel, case.op
        layers = [self._inputs(case, layer) for layer in ("first", "second")]  # which share what was prepared
        prepared = kernel.prepare(layers[0].batch)
        for inputs in layers:
            q, cache = inputs.in_projection(case.num_kv_heads, beside=1.0).q, inputs.cache
            stored = cache.k.clone(), cache.v.clone()
            want = paged_attention(inputs.batch, op, q, cache, inputs.sinks)
            forward: Callable[..., Tensor] = kernel.forward
            got = forward(prepared, op, q, cache, *inputs.more)
            wrong = tensor_problem(got, want.shape, q.dtype, q.device) or value_problem(got, want, self._tolerance)
            if not wrong and not all(map(_same, stored, (cache.k, cache.v))):
                wrong = "changed the cache, which it may only read"
            if wrong:
                raise contract_error(kernel, "forward", wrong)
        if isinstance(kernel, NativeAttention) and q.device.type == "cpu":
            self._try_native(kernel, op, replace(inputs, q=q), want)

    def _inputs(self, case: AttentionCase, layer: str) -> AttentionInputs:
        one = replace(case, name=f"{case.name}, {layer}")
        made = make_inputs(one, self.dtype, self.device, self.kv_format, tables_of=case, poisoned=False)
        return made.with_bounds(1)

    def _try_shared(self, case: AttentionCase, ranks: int, index: int) -> None:
        """Attention to the tokens that one of several ranks has: which those are does not matter."""
        kernel, op, inputs = self.kernel, case.op, of_rank(case, self._inputs(case, "first"), ranks, index)
        assert isinstance(kernel, LogSumExpAttention), "negotiation asks for it"
        want, want_lse = paged_attention_lse(inputs.batch, op, inputs.q, inputs.cache)
        made: object = kernel.forward_lse(kernel.prepare(inputs.batch), op, inputs.q, inputs.cache)
        if not isinstance(made, tuple) or len(made) != 2:
            raise contract_error(
                kernel, "forward_lse", f"returned {quote(made)}, expected the output and its log-sum-exp"
            )
        out, lse = made
        wrong = tensor_problem(out, want.shape, want.dtype, want.device)
        wrong = wrong or tensor_problem(lse, want_lse.shape, torch.float32, want.device)
        none = want_lse == float("-inf")
        if not wrong and not torch.equal(lse == float("-inf"), none):
            wrong = "returned a log-sum-exp that is not -inf where a query sees no key, or is where it sees one"
        seen = (~none).repeat_interleave(op.out_dim, dim=1)
        if not wrong:
            wrong = value_problem(torch.where(seen, out, 0), torch.where(seen, want, 0), self._tolerance)
        if not wrong:
            wrong = value_problem(lse[~none], want_lse[~none], self._tolerance)
        if wrong:
            raise contract_error(kernel, "forward_lse", wrong)

    @property
    def _tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    def _try_native(self, kernel: NativeAttention, op: Attention, inputs: AttentionInputs, want: Tensor) -> None:
        memory = Bounded(want.shape, want.dtype)
        prepared = self.kernel.prepare(inputs.batch)  # lives until the call is made: it is pointed at
        call = kernel.call(prepared, op, inputs.q, inputs.cache, memory.inner, *inputs.more)
        if call is None:
            return
        call()
        del prepared
        wrong = memory.problem() or value_problem(memory.inner, want, self._tolerance)
        if wrong:
            raise contract_error(kernel, "call", wrong)


def _same(before: Tensor, after: Tensor) -> bool:
    return torch.equal(as_bits(before), as_bits(after))
