"""``quantizer=int8``, ``int4``, ``fp8``: weights are rounded while an unquantized checkpoint is loaded."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from engine.contracts.model import ModelFacts
from engine.contracts.ops import LinearSpec
from engine.contracts.provider import BuildContext
from engine.contracts.quantizer import (
    UNQUANTIZED,
    Keeping,
    PlainWeight,
    QuantizedWeight,
    StoredTensor,
    WeightFormat,
)
from engine_plugins.quantizer.config import FP8Config, Int4Config, Int8Config, OnLoadConfig
from engine_plugins.quantizer.rounding import rounded
from engine_plugins.quantizer.unquantized import joined_bias, joined_weight

GIB = 1 << 30


class OnLoad(ABC):
    """See :class:`engine.contracts.quantizer.Quantizer` and ``KeepingQuantizer``. Formats differ in how they round.

    Large layers are kept on disk as kernels read them: the next start reads them, and nothing of the checkpoint for
    them.
    """

    lossless = False

    def __init__(self, config: Int8Config | Int4Config | FP8Config, context: BuildContext) -> None:
        self._activations = config.activations
        self._head = config.head
        self.keeping = keeping(config, context.model)

    def stored(self, spec: LinearSpec) -> Sequence[StoredTensor]:
        form = self.format(spec)
        if form is None or form.group_size >= spec.in_features:
            return UNQUANTIZED
        weight, bias = UNQUANTIZED
        return replace(weight, together={"in": form.group_size}), bias

    def format(self, spec: LinearSpec) -> WeightFormat | None:
        if spec.kind == "head" and self._head == "none":
            return None
        in_bytes = spec.kind == "head" and self._head == "int8"
        form = WeightFormat(8, spec.in_features) if in_bytes else self._form(spec)
        return replace(form, input_quant=self._input_quant_of(spec))

    def pack(
        self, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: Any, device: str
    ) -> PlainWeight | QuantizedWeight:
        form = self.format(spec)
        if form is None:
            return PlainWeight(joined_weight(parts), joined_bias(parts))
        weight = rounded(joined_weight(parts), joined_bias(parts), form, device)
        return replace(weight, input_quant=form.input_quant)

    def _input_quant_of(self, spec: LinearSpec) -> Literal["int8", "fp8"] | None:
        # An int8 head takes no fp8 activations; and errors of the head show in every token.
        if self._activations == "fp8":
            return None if spec.kind == "head" else "fp8"
        return "int8" if self._activations == "int8" else None

    @abstractmethod
    def _form(self, spec: LinearSpec) -> WeightFormat:
        """What a layer is rounded to that is no head with a form of its own."""


class Int8(OnLoad):
    """One scale per output channel."""

    def _form(self, spec: LinearSpec) -> WeightFormat:
        return WeightFormat(8, spec.in_features)


class FP8(OnLoad):
    """e4m3, one scale per output channel."""

    def _form(self, spec: LinearSpec) -> WeightFormat:
        return WeightFormat(8, spec.in_features, floating=True)


class Int4(OnLoad):
    """A scale for every ``group_size`` inputs of an output channel."""

    def __init__(self, config: Int4Config, context: BuildContext) -> None:
        super().__init__(config, context)
        self._group_size = config.group_size

    def _form(self, spec: LinearSpec) -> WeightFormat:
        return WeightFormat(4, self._group_size)


def keeping(config: OnLoadConfig, model: ModelFacts) -> Keeping:
    """Where a model's rounded weights are kept."""
    kind = type(config).__name__.removesuffix("Config").lower()
    readable = re.sub(r"[^\w.-]", "_", model.name)[-60:].lstrip(".")
    maker = f"{model.path} {kind} {_code()}"
    return Keeping(config.cache, int(config.cache_gib * GIB), f"{readable}-{kind}", maker)


@cache
def _code() -> str:
    """Of the code that rounds: a number that is to be raised with every change would be forgotten."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
