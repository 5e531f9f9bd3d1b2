"""A quantizer's linear layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.contracts.ops import LinearSpec
from engine.contracts.quantizer import PackedLinear, Quantizer, TileLoader
from engine.kernels.checks.tensors import Bounded, random, tensor_problem, value_problem
from engine.kernels.torch.reference import gated_activation
from engine.native import ACTIVATIONS
from engine.plugin_guard.calls import PluginError, contract_error, name_of, noting, quote

ROWS = (1, 3, 17, 70)
"""A decode, drafts under verification, and more rows than few-row kernels serve."""
NATIVE_ROWS = (1, 2, 5, 9, 16)
"""Of programs: a step of more tokens is none."""
FEW = 3
"""Rows with which everything but ``apply`` is tried."""
TOLERANCE = {torch.float32: 0.001, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Accepted error of a product: wrong weights are off by more, rounding by less."""
ROUNDED = 0.05
"""The same for a layer that takes its input in 8 bits."""
MOST_COMPARED = 2**25
"""Weights of a layer up to which products are compared with ``reference``, which may unpack all of them."""
_CALLS = ("reference", "apply", "apply_add", "apply_gated", "native", "apply_quantized")


class LinearCheck:
    """Tries every kind of layer that a quantizer packs; layers of one kind have the same shape, label and tensors."""

    def __init__(self, quantizer: Quantizer, dtype: torch.dtype, device: str) -> None:
        self._quantizer = quantizer
        self._dtype = dtype
        self._device = torch.device(device)
        self._seen: Counter[object] = Counter()

    def __call__(
        self,
        spec: LinearSpec,
        parts: Sequence[Mapping[str, Tensor]],
        packed: object,
        act: str,
    ) -> PackedLinear:
        """``packed``, made of ``parts``, whose calls carry the quantizer's name from now on. ``act``: what gates are
        put through."""
        in_features, out_features = spec.in_features, spec.out_features
        if not isinstance(packed, PackedLinear):
            expected = "a PackedLinear or a QuantizedWeight"
            raise contract_error(self._quantizer, "pack", f"returned {quote(packed)}, expected {expected}")
        self._check_record(packed, out_features)
        named = _named(packed, name_of(self._quantizer))
        kind = (spec.kind, in_features, out_features, packed.label, tuple(_kinds(packed)))
        if not self._seen[kind]:
            _Trial(self, spec, named, in_features, out_features, act).run()
        if self._seen[kind] < 2 and in_features * out_features <= MOST_COMPARED:  # the second must not be the first
            self._check_weights(parts, named, in_features)
        self._seen[kind] += 1
        return named

    def _check_weights(self, parts: Sequence[Mapping[str, Tensor]], packed: PackedLinear, in_features: int) -> None:
        """A lossless quantizer multiplies with the weights as they are stored, where these are plain numbers."""
        if not self._quantizer.lossless or not all(part.keys() <= {"weight", "bias"} for part in parts):
            return
        if not all(part["weight"].dtype in TOLERANCE for part in parts):
            return
        weight = torch.cat([part["weight"] for part in parts]).to(self._device, self._dtype)
        biases = [part.get("bias", part["weight"].new_zeros(len(part["weight"]))) for part in parts]
        x = random((1, in_features), self._dtype, self._device, 5)
        want = F.linear(x, weight, torch.cat(biases).to(self._device, self._dtype))
        problem = value_problem(packed.apply(x), want, TOLERANCE[self._dtype])
        self.fail("pack", problem and f"says lossless=True, and its product {problem} by the checkpoint's weights")

    def _check_record(self, packed: PackedLinear, out_features: int) -> None:
        tensors = packed.tensors
        if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise self._broken(f"tensors={quote(tensors)}, expected tensors by name")
        if not isinstance(packed.label, str):
            raise self._broken(f"label={quote(packed.label)}, expected a text")
        if packed.out_features != out_features:
            raise self._broken(f"out_features={quote(packed.out_features)}, expected {out_features}")
        for name in _CALLS:
            found = getattr(packed, name)
            if not callable(found) and (found is not None or name in ("reference", "apply")):
                raise self._broken(f"{name}={quote(found)}, expected a function")
        if (packed.input_quant is None) != (packed.apply_quantized is None):
            raise self._broken("one of input_quant and apply_quantized, expected both or none")
        loader = packed.tile_loader
        if loader is not None and not isinstance(loader, TileLoader):
            raise self._broken(f"tile_loader={quote(loader)}, expected a TileLoader")
        for name, tensor in _loaded(loader):
            if not isinstance(tensor, Tensor) or not tensor.is_contiguous() or tensor.device.type != self._device.type:
                raise self._broken(f"tile_loader.{name}, expected a contiguous tensor on {self._device}")

    def _broken(self, problem: str) -> PluginError:
        return contract_error(self._quantizer, "pack", f"returned a layer with {problem}")

    def fail(self, call: str, problem: str) -> None:
        if problem:
            raise contract_error(self._quantizer, call, problem)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device


class _Trial:
    """One layer on random inputs."""

    def __init__(
        self,
        check: LinearCheck,
        spec: LinearSpec,
        packed: PackedLinear,
        in_features: int,
        out_features: int,
        act: str,
    ) -> None:
        self._check = check
        self._packed = packed
        self._in, self._out = in_features, out_features
        gates = spec.kind == "gate_up"
        self._act = act if gates and act in ACTIVATIONS else None
        self._native = None if gates and self._act is None else packed.native
        """Of gates only what a layer has a kernel for is ever called."""
        self._what = "+".join(part.name for part in spec.parts)
        self._compares = in_features * out_features <= MOST_COMPARED
        # What rounds its input to 8 bits may do so for some numbers of rows only.
        self._tolerance = TOLERANCE[check.dtype] if packed.input_quant is None else ROUNDED

    def run(self) -> None:
        x = random((max(ROWS), self._in), self._check.dtype, self._check.device)
        before = x.clone()
        want = self._packed.reference(x) if self._compares else None
        if want is not None:
            self._look("reference", want, len(x), self._out)
        for rows in ROWS:
            product = self._packed.apply(x[:rows])
            self._look("apply", product, rows, self._out)
            if want is not None:
                self._fail("apply", value_problem(product, want[:rows], self._tolerance))
        few = x[:FEW]
        product, again = self._packed.apply(few), self._packed.apply(few)
        if again.data_ptr() in (product.data_ptr(), x.data_ptr()):
            self._fail("apply", "returned memory that is in use, expected new memory")
        self._look_at_others(few, product)
        if self._native is not None and x.device.type == "cpu":
            for rows in NATIVE_ROWS:
                product = self._packed.apply(x[:rows])
                gated = product if self._act is None else gated_activation(product, self._act)
                self._look_at_native(self._native, x[:rows], gated)
        if not torch.equal(x, before):
            self._fail("apply", "changed its input")

    def _look_at_others(self, x: Tensor, product: Tensor) -> None:
        """What a layer offers beside ``apply``, which gave ``product``."""
        packed, rows = self._packed, len(x)
        if packed.apply_add is not None:
            residual = random((rows, self._out), x.dtype, x.device, 7)
            want = residual.double() + product.double()
            added = packed.apply_add(x, residual)
            self._look("apply_add", added, rows, self._out)
            self._fail("apply_add", value_problem(added, want, self._tolerance))
        gated = None if self._act is None else gated_activation(product.clone(), self._act)
        if gated is not None and self._act is not None and packed.apply_gated is not None:
            found = packed.apply_gated(x, self._act)
            self._look("apply_gated", found, rows, self._out // 2)
            self._fail("apply_gated", value_problem(found, gated, 2 * self._tolerance))

    def _look_at_native(self, native: Callable[..., Any], x: Tensor, want: Tensor) -> None:
        memory = Bounded(want.shape, x.dtype)
        native(x, memory.inner, act=self._act)()
        self._fail("native", memory.problem())
        self._fail("native", value_problem(memory.inner, want, 2 * self._tolerance))
        if self._act is None:  # in place, as the residual stream is added to
            native(x, memory.inner, memory.inner)()
            self._fail("native", memory.problem())
            self._fail("native", value_problem(memory.inner, 2.0 * want.double(), 2 * self._tolerance))

    def _look(self, call: str, found: object, rows: int, columns: int) -> None:
        self._fail(call, tensor_problem(found, (rows, columns), self._check.dtype, self._check.device))

    def _fail(self, call: str, problem: str) -> None:
        self._check.fail(call, problem and f"of {self._what} {problem}")


def _named(packed: PackedLinear, who: str) -> PackedLinear:
    """The layer; what its functions raise says whose they are."""
    offered = {name: found for name in _CALLS if (found := getattr(packed, name)) is not None}
    calls: dict[str, Any] = {name: noting(found, f"{who}: {name}()") for name, found in offered.items()}
    return replace(packed, **calls)


def _loaded(loader: TileLoader | None) -> list[tuple[str, object]]:
    if loader is None:
        return []
    fields = ((name, getattr(loader, name)) for name in ("weight", "scale", "zero", "channel_scale", "bias"))
    return [(name, found) for name, found in fields if name == "weight" or found is not None]


def _kinds(packed: PackedLinear) -> list[object]:
    """What tells one kind of layer from another."""
    offered = [name for name in _CALLS if getattr(packed, name) is not None]
    return [*offered, *((name, tensor.dtype) for name, tensor in sorted(packed.tensors.items()))]
