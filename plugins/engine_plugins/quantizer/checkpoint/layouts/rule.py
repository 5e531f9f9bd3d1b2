"""What a stored tensor must look like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.contracts.ops import LinearPart
from engine.contracts.quantizer import StoredHeader, StoredTensor
from engine_plugins.quantizer.checkpoint.scheme import Scheme

FLOATS = ("float32", "bfloat16", "float16")
POWERS = "float8_e8m0fnu"
"""Scales that are powers of two, by their exponent."""
INTEGERS = ("int32", "int64", "int8", "uint8")
Shape = tuple[int, ...]
BOTH: tuple[Literal["out"], Literal["in"]] = ("out", "in")


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One tensor, the dtypes it may have (names of torch dtypes) and the shapes; no shapes: any."""

    stored: StoredTensor
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...] = ()

    def broken_by(self, name: str, header: StoredHeader) -> Iterator[str]:
        """What is wrong with the tensor called ``name``."""
        if header.dtype not in self.dtypes:
            yield f"{name} is {header.dtype}, expected {' or '.join(self.dtypes)}"
        if self.shapes and header.shape not in self.shapes:
            allowed = " or ".join(str(list(shape)) for shape in self.shapes)
            yield f"{name} has shape {list(header.shape)}, expected {allowed}"


def bias_rule(part: LinearPart, may_be_extra: bool = False) -> TensorRule:
    """The bias that every layout stores in the same way."""
    stored = StoredTensor("bias", {"out": 0}, optional=True, extra=may_be_extra)
    return TensorRule(stored, FLOATS, ((part.out_features,),))


def scale_rules(scheme: Scheme, part: LinearPart, in_features: int) -> list[TensorRule]:
    """Scales beside weights ``[out, in]``: for the tensor, an output feature, a group or a block."""
    out, groups = part.out_features, scheme.groups(in_features)
    rows = -(-out // scheme.block[0])
    shapes: dict[str, tuple[Shape, ...]] = {
        "tensor": ((), (1,), (1, 1)),
        "channel": ((out, 1), (out,)),
        "group": ((out, groups),),
        "block": ((rows, 1, groups, 1) if scheme.spaced else (rows, groups),),
    }
    dtypes = (*FLOATS, POWERS) if scheme.granularity == "block" else FLOATS
    one_of_several = len(scheme.scale_names) > 1
    return [
        TensorRule(_scale(scheme, name, in_features, optional=one_of_several), dtypes, shapes[scheme.granularity])
        for name in scheme.scale_names
    ]


def _scale(scheme: Scheme, suffix: str, in_features: int, optional: bool) -> StoredTensor:
    if scheme.granularity == "tensor":
        return StoredTensor(suffix, optional=optional, replicated=BOTH)
    if scheme.granularity == "channel":
        return StoredTensor(suffix, {"out": 0}, optional=optional, replicated=("in",))
    per_entry = {"in": scheme.group_size(in_features), "out": scheme.block[0] if scheme.granularity == "block" else 1}
    # Each rank that has a part of the output features of a block reads its scale.
    axes = {"out": 0, "in": 2 if scheme.spaced else 1}
    return StoredTensor(suffix, axes, per_entry, optional=optional, overlapping=("out",))
