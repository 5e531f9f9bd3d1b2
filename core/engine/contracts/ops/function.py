"""The escape into torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.contracts.ops.base import Mine, Node, Op

FUNCTION_RESULTS = 4
"""What the operations of a torch function have made and not given back, at most, in outputs of the function: it is not
known, and functions are short."""


@dataclass(frozen=True, slots=True)
class TorchFunction(Op):
    """What no other op computes: ``function(*inputs, *tensors) -> [num_tokens, out_features]``, a plain function of
    torch.

    Inputs have the compute dtype, tensors are float32; what comes out is rounded to the compute dtype. Each token is
    computed by itself, into new memory, and nothing waits for the device. No kernel is ever fused with it.
    """

    function: str
    """``package.module:function``, imported where the model is loaded."""
    in_features: tuple[int, ...]
    """Of each input."""
    out_features: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Whole names and shapes of tensors of the checkpoint. Every rank has all of them."""
    by_feature: bool = False
    """Each feature of the output follows from the same feature of the inputs: ranks may compute some of them each."""

    def parts(self, size: int) -> int | None:
        return size if self.by_feature else None

    def of_rank(self, node: Node, mine: Mine) -> Node:
        size = mine(self.out_features).size
        return replace(node, op=replace(self, in_features=(size,) * len(self.in_features), out_features=size))

    def beside(self, inputs: int) -> int:
        return FUNCTION_RESULTS * self.out_features
