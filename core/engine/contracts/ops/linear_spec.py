"""Linear layers, as the checkpoint has them and as a rank has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from engine.contracts.ops.values import Cut, Range


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One projection as the checkpoint stores it: ``{name}.weight`` is ``[out_features, in_features]``."""

    name: str
    out_features: int
    bias: bool = False
    slices: tuple[int, ...] = ()
    """Sizes of what lies one after another along the output, where the checkpoint has fused it (q, k and v; gate and
    up): each is a value of its own. Their sum is ``out_features``."""

    @property
    def outputs(self) -> tuple[int, ...]:
        """Sizes of the values that it makes."""
        return self.slices or (self.out_features,)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One multiplication; several parts share their input and are fused along the output."""

    parts: tuple[LinearPart, ...]
    in_features: int
    shard: Literal["out", "in", "none"] = "none"
    """Axis that tensor parallelism cuts: ``out`` for q/k/v, gate/up and the head; ``in`` for o and down."""
    kind: Literal["body", "gate_up", "head"] = "body"
    """``gate_up``: two outputs of equal size, gate and up, of which ``act(gate) * up`` is computed: set by the core
    where it has a kernel for that."""
    share: Share | None = None
    """Set by the core for a layer that ranks share out: sizes are then those of one rank's share."""

    @property
    def whole(self) -> LinearSpec:
        """The layer as the checkpoint has it."""
        return self if self.share is None else replace(self.share.whole, kind=self.kind)

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Sizes of the values that it makes."""
        return tuple(size for part in self.parts for size in part.outputs)

    @property
    def num_weights(self) -> int:
        return self.in_features * self.out_features

    def some_inputs(self, mine: Cut) -> LinearSpec:
        """A rank's share, of these input features: its outputs are summands."""
        share = Share(self, tuple(((0, part.out_features),) for part in self.parts), (mine.start, mine.stop))
        # Summands are added up: only one brings the biases.
        parts = self.parts if mine.start == 0 else tuple(replace(part, bias=False) for part in self.parts)
        return replace(self, parts=parts, in_features=mine.size, share=share)

    def some_outputs(self, own: Sequence[Cut]) -> LinearSpec:
        """A rank's share, of these features of each value that the layer makes."""
        parts: list[LinearPart] = []
        rows: list[tuple[Range, ...]] = []
        cuts = iter(own)
        for part in self.parts:
            begins = accumulate(part.outputs, initial=0)
            mine = [(begin, next(cuts)) for begin, _ in zip(begins, part.outputs, strict=False)]
            rows.append(tuple((begin + cut.start, begin + cut.stop) for begin, cut in mine))
            sizes = tuple(cut.size for _, cut in mine)
            parts.append(replace(part, out_features=sum(sizes), slices=sizes if part.slices else ()))
        return replace(self, parts=tuple(parts), share=Share(self, tuple(rows)))


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has of a linear layer."""

    whole: LinearSpec
    rows: tuple[tuple[Range, ...], ...]
    """By part, its output features, in order: several ranges of a part that the checkpoint has fused."""
    columns: Range | None = None
    """Its input features; ``None``: all. Outputs are then summands, and only who has the first feature adds biases."""
