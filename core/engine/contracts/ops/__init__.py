"""Typed operations: what a model computes, one step of its paper each.

A value is ``[num_tokens, features]``; heads lie one after another in it. An op says what is computed of its inputs and
which tensors of the checkpoint it reads, and nothing of how: the core finds kernels for single ops and for sequences of
them. Architectures call :class:`engine.contracts.graph.Builder`, which makes them or takes one with many fields.

A file has one kind of op, with what it answers of itself (:class:`Op`). A new op is a file here, a kernel for each
backend that is to have one, and a test; :meth:`engine.contracts.graph.Builder.op` records it.
"""

from engine.contracts.ops.attention import Attention, KVWrite, SharedAttention
from engine.contracts.ops.base import Op
from engine.contracts.ops.elementwise import (
    Activation,
    Add,
    Gate,
    Gated,
    PositionScale,
    Scale,
    ScaleBy,
    SoftCap,
)
from engine.contracts.ops.embed import Embed
from engine.contracts.ops.exchange import AllGather, AllReduce, GatherTokens, SumTokens
from engine.contracts.ops.experts import CountExperts, Experts, FusedExperts, HeldExperts, OwnExperts, Route, Router
from engine.contracts.ops.features import HeadJoin, HeadSlice, Slice
from engine.contracts.ops.function import TorchFunction
from engine.contracts.ops.head_linear import HeadLinear
from engine.contracts.ops.linear import Linear
from engine.contracts.ops.linear_spec import LinearPart, LinearSpec, Share
from engine.contracts.ops.norm import Norm
from engine.contracts.ops.recurrent import MOST_TAPS, DeltaRule, ShortConv
from engine.contracts.ops.rope import Rope, RopeFacts
from engine.contracts.ops.values import Act, Cut, Range

__all__ = [
    "MOST_TAPS", "Act", "Activation", "Add", "AllGather", "AllReduce", "Attention", "CountExperts", "Cut", "DeltaRule",
    "Embed", "Experts", "FusedExperts", "Gate", "Gated", "GatherTokens", "HeadJoin", "HeadLinear", "HeadSlice",
    "HeldExperts", "KVWrite", "Linear", "LinearPart", "LinearSpec", "Norm", "Op", "OwnExperts", "PositionScale",
    "Range", "Rope", "RopeFacts", "Route", "Router", "Scale", "ScaleBy", "Share", "SharedAttention", "ShortConv",
    "Slice", "SoftCap", "SumTokens", "TorchFunction",
]  # fmt: skip
