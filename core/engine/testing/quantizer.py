"""Conformance suite for quantizers: derive a test class, say how to make yours, and run pytest.

.. code-block:: python

    class TestMine(QuantizerConformance):
        weight_error = 0.1  # of the largest weight: what 4 bits cost

        def make(self):
            return Mine(MineConfig(), build_context())

A quantizer that reads packed checkpoints overrides :meth:`QuantizerConformance.parts` to make such tensors, and
:meth:`QuantizerConformance.weights` to say which weights they stand for.

What a quantizer may offer beside products has suites of its own, to inherit as well: :class:`AddConformance`,
:class:`GateConformance`, :class:`NativeConformance` and, run where Triton kernels run, :class:`TileLoaderConformance`.
The first test fails until the suites of all that is offered are inherited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.contracts.ops import LinearPart, LinearSpec, Share
from engine.contracts.quantizer import (
    CheckingQuantizer,
    PackedLinear,
    QuantizedWeight,
    Quantizer,
    SizedQuantizer,
    StoredHeader,
    StoredTensor,
)
from engine.kernels.packing import Target, pack_quantized
from engine.kernels.torch.reference import gated_activation
from engine.kernels.triton.device import runs_triton
from engine.models.sharding import has_bias, taken
from engine.testing.subject import Subject, Suite, filled

SPECS: dict[str, LinearSpec] = {
    "one_part": LinearSpec((LinearPart("o", 96),), 64),
    "qkv_with_bias": LinearSpec(
        (LinearPart("q", 128, True), LinearPart("k", 32, True), LinearPart("v", 32, True)), 128
    ),
    "bias_on_some_parts": LinearSpec((LinearPart("q", 64, True), LinearPart("k", 32)), 64),
    "wide_input": LinearSpec((LinearPart("down", 32),), 512),
    "gate_up": LinearSpec((LinearPart("gate", 160), LinearPart("up", 160)), 64, kind="gate_up"),
    "gate_up_with_bias": LinearSpec((LinearPart("gate", 40, True), LinearPart("up", 40, True)), 96, kind="gate_up"),
    "head": LinearSpec((LinearPart("head", 320),), 64, kind="head"),
}
CUT: dict[str, LinearSpec] = {
    "out": LinearSpec((LinearPart("q", 256, True), LinearPart("k", 256)), 512, shard="out"),
    "in": LinearSpec((LinearPart("o", 256, True),), 512, shard="in"),
}
"""Cut in two for tensor parallelism, along each axis: large enough for words and scale blocks of any format."""
ADDED, GATED = ("one_part", "wide_input", "bias_on_some_parts"), ("gate_up", "gate_up_with_bias")
"""Specs whose layers may add to a residual, and gate."""
ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 129)
"""Numbers of rows: one decode, verification of drafts, and borders of the tiles that kernels use."""
DTYPES: dict[str, float] = {"float32": 1e-5, "bfloat16": 2.0**-7}
"""Largest accepted ``|apply - reference|`` as a share of the largest output, by compute dtype."""


class QuantizerConformance:
    """What the core relies on."""

    device = "cpu"
    dtypes: tuple[str, ...] = tuple(DTYPES)
    """Compute dtypes the quantizer offers."""
    rows: tuple[int, ...] = ROWS
    adds: tuple[str, ...] = ()
    """Those of ``SPECS`` whose layers have ``apply_add``; see :class:`AddConformance`."""
    gates: tuple[str, ...] = ()
    """Those of ``SPECS`` whose layers have ``apply_gated``; see :class:`GateConformance`."""
    weight_error = 0.0
    """Accepted error of a weight, as a share of the largest weight of its part. 0 for lossless quantizers."""

    def make(self) -> Quantizer:
        """The quantizer under test."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Cases of what the quantizer offers, and no others."""
        for argument, values in {"dtype": self.dtypes, "added": self.adds, "gated": self.gates}.items():
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, values)

    def parts(self, spec: LinearSpec, dtype: torch.dtype) -> list[dict[str, Tensor]]:
        """Checkpoint tensors of every part, by suffix; parts differ in magnitude, as q, k and v do."""
        generator = torch.Generator().manual_seed(7)
        made = []
        for i, part in enumerate(spec.parts):
            weight = torch.randn(part.out_features, spec.in_features, generator=generator) * 0.05 * 10.0 ** (i - 1)
            tensors = {"weight": weight.to(dtype)}
            if part.bias:
                tensors["bias"] = torch.randn(part.out_features, generator=generator).to(dtype)
            made.append(tensors)
        return made

    def weights(self, parts: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """The weights ``[out, in]`` those tensors stand for."""
        return [tensors["weight"] for tensors in parts]

    def pack(self, spec: LinearSpec, dtype: str) -> tuple[PackedLinear, list[dict[str, Tensor]]]:
        parts = self.parts(spec, getattr(torch, dtype))
        return self.layer_of(self.make(), spec, parts, getattr(torch, dtype)), parts

    def layer_of(
        self, quantizer: Quantizer, spec: LinearSpec, parts: Sequence[Mapping[str, Tensor]], dtype: torch.dtype
    ) -> PackedLinear:
        """A weight that is data is packed as the core does."""
        made = quantizer.pack(spec, parts, dtype, self.device)
        return pack_quantized(spec, made, Target(self.device)) if isinstance(made, QuantizedWeight) else made

    def inputs(self, spec: LinearSpec, rows: int, dtype: str) -> Tensor:
        generator = torch.Generator().manual_seed(rows)
        return torch.randn(rows, spec.in_features, generator=generator).to(self.device, getattr(torch, dtype))

    def columns(self, packed: PackedLinear, in_features: int, dtype: str) -> Tensor:
        """The weights ``[out, in]`` that a layer multiplies with: unit vectors read them."""
        unit = torch.eye(in_features, dtype=getattr(torch, dtype), device=self.device)
        zero = torch.zeros(1, in_features, dtype=unit.dtype, device=self.device)
        return (packed.reference(unit).double() - packed.reference(zero).double()).T.cpu()

    def check_weight(self, got: Tensor, want: Tensor, dtype: str, bias: bool, what: str) -> None:
        """A weight that was read from a layer is the checkpoint's, as nearly as the format can hold it."""
        largest = float(want.double().abs().max())
        # With a bias the sum is rounded to the dtype, so the weight read back carries that rounding too.
        rounding = torch.finfo(getattr(torch, dtype)).eps * (largest + (4.0 if bias else 0.0))
        gap = float((got - want.double()).abs().max())
        accepted = self.weight_error * largest + rounding
        assert gap <= accepted, f"{what}: off by {gap / largest:.4f} of the largest, weight_error = {self.weight_error}"

    def test_declares_what_the_core_plans_with(self) -> None:
        quantizer = self.make()
        assert isinstance(quantizer, Quantizer)
        assert type(quantizer.lossless) is bool
        assert not (quantizer.lossless and self.weight_error), "lossless, with an accepted error"

    @pytest.mark.parametrize("name", SPECS)
    def test_apply_equals_the_reference_for_any_number_of_rows(self, name: str, dtype: str) -> None:
        spec = SPECS[name]
        packed, _ = self.pack(spec, dtype)
        for rows in self.rows:
            x = self.inputs(spec, rows, dtype)
            want, got = packed.reference(x), packed.apply(x)
            assert got.shape == want.shape == (rows, spec.out_features)
            assert got.dtype == want.dtype == x.dtype and got.is_contiguous()
            gap = float((got.double() - want.double()).abs().max() / want.double().abs().max())
            assert gap <= DTYPES[dtype], f"{rows} rows: {gap:.1e}"

    @pytest.mark.parametrize("name", SPECS)
    def test_the_reference_multiplies_with_the_checkpoints_weights(self, name: str, dtype: str) -> None:
        """Column by column: unit vectors read the weights out of the layer."""
        spec = SPECS[name]
        packed, parts = self.pack(spec, dtype)
        read, first = self.columns(packed, spec.in_features, dtype), 0
        for part, weight in zip(spec.parts, self.weights(parts), strict=True):
            self.check_weight(read[first : first + part.out_features], weight, dtype, part.bias, part.name)
            first += part.out_features

    @pytest.mark.parametrize("stored", ["float32", "bfloat16"])
    def test_the_checkpoint_may_be_in_another_dtype_and_stays_as_it_is(self, stored: str, dtype: str) -> None:
        """It may be shared, as a tied embedding is."""
        spec = SPECS["qkv_with_bias"]
        parts = self.parts(spec, getattr(torch, stored))
        kept = [{suffix: tensor.clone() for suffix, tensor in part.items()} for part in parts]
        packed = self.layer_of(self.make(), spec, parts, getattr(torch, dtype))
        for part, was in zip(parts, kept, strict=True):
            assert all(torch.equal(bits_of(part[suffix]), bits_of(tensor)) for suffix, tensor in was.items())
        x = self.inputs(spec, 3, dtype)
        want, got = packed.reference(x), packed.apply(x)
        assert got.dtype == want.dtype == x.dtype
        assert float((got.double() - want.double()).abs().max()) <= DTYPES[dtype] * float(want.double().abs().max())
        weight = torch.cat([weight.double() for weight in self.weights(parts)])
        self.check_weight(self.columns(packed, spec.in_features, dtype), weight, dtype, True, f"{stored} as {dtype}")

    @pytest.mark.parametrize("axis", CUT)
    def test_cuts_for_tensor_parallelism_are_cuts_of_the_layer(self, axis: str) -> None:
        """The core cuts what is stored as ``StoredTensor`` says; each rank packs its own share. What cannot
        be cut says why."""
        spec, dtype = CUT[axis], self.dtypes[0]
        parts = self.parts(spec, getattr(torch, dtype))
        stored = {one.suffix: one for one in self.make().stored(spec)}
        if whole := [one for one in stored.values() if one.suffix in parts[0] and not may_be_cut(one, axis)]:
            assert any(one.uncuttable for one in whole), (
                f"{whole[0].suffix}: no reason why it cannot be cut along {axis}"
            )
            return
        weights = self.weights(parts)
        for rank in range(2):
            share = shares(spec)[rank]
            mine = [
                {
                    suffix: taken(tensor, stored[suffix], share, number)
                    for suffix, tensor in part.items()
                    if suffix != "bias" or has_bias(share)
                }
                for number, part in enumerate(parts)
            ]
            packed = self.layer_of(self.make(), share, mine, getattr(torch, dtype))
            outs, size = [part.out_features for part in share.parts], share.in_features
            read = torch.split(self.columns(packed, size, dtype), outs)
            for part, got, weight in zip(spec.parts, read, weights, strict=True):
                want = weight.chunk(2, 0 if axis == "out" else 1)[rank]
                assert got.shape == want.shape, f"{part.name}: {list(got.shape)} of rank {rank}, cut along {axis}"
                self.check_weight(got, want, dtype, part.bias, f"{part.name} of rank {rank}, cut along {axis}")
            zero = torch.zeros(1, size, dtype=getattr(torch, dtype), device=self.device)
            biases = [part["bias"].float() if "bias" in part else torch.zeros(out) for part, out in zip(mine, outs)]
            assert torch.allclose(packed.reference(zero).cpu().float()[0], torch.cat(biases), atol=1e-6)
            x = self.inputs(spec, 1, dtype)[:, :size].contiguous()
            want, applied = packed.reference(x).double(), packed.apply(x).double()
            assert applied.shape == want.shape
            assert float((applied - want).abs().max()) <= DTYPES[dtype] * float(want.abs().max())

    @pytest.mark.parametrize("name", ["qkv_with_bias", "bias_on_some_parts"])
    def test_a_bias_is_added_to_its_own_part_only(self, name: str) -> None:
        spec, dtype = SPECS[name], self.dtypes[0]
        packed, parts = self.pack(spec, dtype)
        got = packed.apply(self.inputs(spec, 3, dtype) * 0).cpu()
        none = [torch.zeros(part.out_features) for part in spec.parts]
        want = torch.cat([tensors.get("bias", zeros).float() for tensors, zeros in zip(parts, none, strict=True)])
        assert torch.allclose(got.float(), want.expand(3, -1), atol=1e-6)

    def test_fusing_parts_changes_no_part(self) -> None:
        spec, dtype = SPECS["qkv_with_bias"], self.dtypes[0]
        fused, parts = self.pack(spec, dtype)
        x = self.inputs(spec, 5, dtype)
        alone = [
            self.layer_of(self.make(), LinearSpec((part,), spec.in_features), [tensors], x.dtype).reference(x)
            for part, tensors in zip(spec.parts, parts, strict=True)
        ]
        want = torch.cat(alone, dim=-1).float()
        gap = float((fused.reference(x).float() - want).abs().max() / want.abs().max())
        assert gap <= DTYPES[dtype]

    def test_inputs_are_left_alone_and_results_are_the_callers(self, dtype: str) -> None:
        """A layer keeps no result that another call could change, and the caller may overwrite what it got."""
        spec = SPECS["one_part"]
        packed, _ = self.pack(spec, dtype)
        for rows in (1, 17):
            x, other = self.inputs(spec, rows, dtype), self.inputs(spec, rows, dtype) + 1.0
            before = x.clone()
            first = packed.apply(x)
            kept = first.clone()
            packed.apply(other)
            assert torch.equal(x, before), "the input was changed"
            assert torch.equal(first, kept), "a later call changed an earlier result"
            first.fill_(float("nan"))
            assert torch.equal(packed.apply(x), kept), "a layer computes with what it returned before"

    def test_inputs_in_8_bits_give_what_apply_gives(self, dtype: str) -> None:
        spec = SPECS["one_part"]
        packed, _ = self.pack(spec, dtype)
        assert packed.input_quant in (None, "int8", "fp8")
        assert (packed.input_quant is None) == (packed.apply_quantized is None), "both, or neither"
        if packed.apply_quantized is None:
            return
        x = self.inputs(spec, 129, dtype)
        kind = torch.int8 if packed.input_quant == "int8" else torch.float8_e4m3fn
        step = (x.float().abs().amax(-1, keepdim=True) / (127.0 if kind == torch.int8 else 448.0)).clamp_min(1e-20)
        codes = x.float() / step
        got = packed.apply_quantized((codes.round() if kind == torch.int8 else codes).to(kind), step, x.dtype)
        want = packed.apply(x)
        assert got.shape == want.shape and got.dtype == x.dtype
        assert float((got.double() - want.double()).abs().max()) <= 2 * DTYPES[dtype] * float(want.double().abs().max())

    @pytest.mark.parametrize("axis", CUT)
    def test_the_bytes_it_says_are_those_it_keeps(self, axis: str, dtype: str) -> None:
        """The core decides by them whether a model fits, before anything is loaded."""
        spec, quantizer = CUT[axis], self.make()
        packed, parts = self.pack(spec, dtype)
        compute = getattr(torch, dtype)
        if isinstance(quantizer, SizedQuantizer):
            said = quantizer.packed_bytes(spec, compute, self.device, False)
        else:
            stored = [tensor for part in parts for tensor in part.values()]
            sizes = [(t.numel(), compute if t.is_floating_point() and t.itemsize > 1 else t.dtype) for t in stored]
            said = sum(count * kind.itemsize for count, kind in sizes)
        kept = packed.num_bytes
        assert type(said) is int and about(said, kept), f"{said} bytes are said, {kept} are kept"

    def test_a_tied_head_takes_the_bytes_that_it_says(self) -> None:
        """The embedding is in memory already: what shares it takes nothing."""
        spec, dtype, quantizer = SPECS["head"], self.dtypes[0], self.make()
        compute = getattr(torch, dtype)
        parts = self.parts(spec, compute)
        plain = set(parts[0]) == {"weight"} and parts[0]["weight"].dtype == compute
        if not plain or not isinstance(quantizer, SizedQuantizer):
            return
        tied = parts[0]["weight"].to(self.device)
        packed = self.layer_of(quantizer, spec, [{"weight": tied}], compute)
        own = [t for t in packed.tensors.values() if t.is_mkldnn or t.data_ptr() != tied.data_ptr()]
        kept, said = (
            sum(t.numel() * t.element_size() for t in own),
            quantizer.packed_bytes(spec, compute, self.device, True),
        )
        assert about(said, kept), f"{said} bytes are said, {kept} are added to the embedding's"

    def test_headers_of_what_it_reads_show_no_problem(self) -> None:
        quantizer = self.make()
        if not isinstance(quantizer, CheckingQuantizer):
            return
        spec = SPECS["qkv_with_bias"]
        headers = {
            f"{part.name}.{suffix}": StoredHeader(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for part, tensors in zip(spec.parts, self.parts(spec, getattr(torch, self.dtypes[0])), strict=True)
            for suffix, tensor in tensors.items()
        }
        assert list(quantizer.problems([spec], headers)) == []

    def test_the_suites_of_what_it_offers_are_inherited(self, dtype: str) -> None:
        packed = {name: self.pack(spec, dtype)[0] for name, spec in SPECS.items()}
        adds = tuple(name for name in ADDED if packed[name].apply_add is not None)
        gates = tuple(name for name in GATED if packed[name].apply_gated is not None)
        native = any(layer.native is not None for layer in packed.values())
        loads = runs_triton(self.device) and any(layer.tile_loader is not None for layer in packed.values())
        assert adds == self.adds, f"apply_add is there for {adds}, AddConformance runs {self.adds}"
        assert gates == self.gates, f"apply_gated is there for {gates}, GateConformance runs {self.gates}"
        assert native == isinstance(self, NativeConformance), f"native calls: {native}, or NativeConformance"
        assert loads == isinstance(self, TileLoaderConformance), f"a tile loader: {loads}, or TileLoaderConformance"

    def test_it_says_what_it_stores(self) -> None:
        spec = SPECS["one_part"]
        packed, parts = self.pack(spec, self.dtypes[0])
        suffixes = {stored.suffix for stored in self.make().stored(spec)}
        required = {stored.suffix for stored in self.make().stored(spec) if not stored.optional}
        assert required <= parts[0].keys() <= suffixes
        assert packed.out_features == spec.out_features
        assert packed.num_bytes > 0 and packed.label
        low, high = packed.good_m
        assert 1 <= low <= high


class AddConformance(QuantizerConformance):
    """For quantizers whose layers offer ``apply_add``."""

    adds = ADDED

    def test_adding_to_a_residual_equals_linear_then_add(self, added: str, dtype: str) -> None:
        spec = SPECS[added]
        packed, _ = self.pack(spec, dtype)
        assert packed.apply_add is not None
        for rows in self.rows:
            x = self.inputs(spec, rows, dtype)
            residual = torch.randn(rows, spec.out_features, generator=torch.Generator().manual_seed(rows)).to(x)
            want = packed.reference(x).double() + residual.double()
            before = x.clone()
            added_to = packed.apply_add(x, residual)
            got = added_to.double()
            assert got.shape == want.shape and added_to.dtype == x.dtype and added_to.is_contiguous()
            assert torch.equal(x, before), "the input was changed"
            assert float((got - want).abs().max()) <= DTYPES[dtype] * float(want.abs().max()), f"{rows} rows"


class GateConformance(QuantizerConformance):
    """For quantizers whose layers offer ``apply_gated``."""

    gates = GATED

    @pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
    def test_gating_equals_linear_then_gate(self, gated: str, act: str, dtype: str) -> None:
        spec = SPECS[gated]
        packed, _ = self.pack(spec, dtype)
        assert packed.apply_gated is not None
        for rows in self.rows:
            x = self.inputs(spec, rows, dtype)
            want, got = gated_activation(packed.reference(x).double(), act), packed.apply_gated(x, act)
            assert got.shape == want.shape and got.dtype == x.dtype and got.is_contiguous()
            # The reference has rounded gates and ups already.
            accepted = 2 * DTYPES[dtype] * float(want.abs().max())
            assert float((got.double() - want).abs().max()) <= accepted, f"{rows} rows"


class NativeConformance(QuantizerConformance):
    """For quantizers whose layers are ``native`` calls."""

    @pytest.mark.parametrize("name", SPECS)
    def test_a_native_call_computes_what_is_there_when_it_is_made(self, name: str, dtype: str) -> None:
        """The same bits as ``apply``, ``apply_add`` and ``apply_gated``."""
        spec = SPECS[name]
        packed, _ = self.pack(spec, dtype)
        assert packed.native is not None
        gated = spec.kind == "gate_up"
        for rows in self.rows:
            given, act = self.inputs(spec, rows, dtype), "silu" if gated else None
            x, y = torch.zeros_like(given), given.new_empty(rows, spec.out_features // (2 if gated else 1))
            call, add = packed.native(x, y, act=act), None if gated else packed.native(x, y, y)
            x.copy_(given)
            call()
            apply_gated = packed.apply_gated or (lambda x, act: gated_activation(packed.apply(x), act))
            assert torch.equal(y, apply_gated(x, "silu") if gated else packed.apply(x)), f"{rows} rows"
            if add is not None and packed.apply_add is not None:
                want = packed.apply_add(x, y.clone())
                add()
                assert torch.equal(y, want), f"{rows} rows, added"

    @pytest.mark.parametrize("name", SPECS)
    def test_a_call_that_says_so_is_made_for_other_rows(self, name: str, dtype: str) -> None:
        """What experts are called by: see :attr:`engine.native.NativeCall.moves`."""
        spec = SPECS[name]
        packed, _ = self.pack(spec, dtype)
        assert packed.native is not None
        act = "silu" if spec.kind == "gate_up" else None
        one = self.inputs(spec, 1, dtype)
        y = one.new_empty(1, spec.out_features // (1 if act is None else 2))
        call = packed.native(one, y, act=act)
        if call.moves is None:
            return
        x = self.inputs(spec, 5, dtype)
        moved, want = y.new_empty(5, y.shape[1]), y.new_empty(5, y.shape[1])
        packed.native(x, want, act=act)()
        arguments = list(call.arguments)
        for at, value in zip(call.moves, (5, x.data_ptr(), moved.data_ptr()), strict=True):
            arguments[at] = value
        call.function(*arguments)
        assert torch.equal(moved, want)


class TileLoaderConformance(QuantizerConformance):
    """For quantizers whose layers offer a ``tile_loader``. Kernels run on a CUDA device, or anywhere with
    ``TRITON_INTERPRET=1`` set before triton is first imported."""

    @pytest.mark.parametrize("name", ["qkv_with_bias", "wide_input", "head"])
    def test_kernels_read_the_tensors_that_the_layer_keeps(self, name: str, dtype: str) -> None:
        """Copies would take memory that nobody has planned."""
        packed, _ = self.pack(SPECS[name], dtype)
        loader, kept = packed.tile_loader, {tensor.data_ptr() for tensor in packed.tensors.values()}
        assert loader is not None
        for what in ("weight", "scale", "zero", "channel_scale", "bias"):
            tensor: Tensor | None = getattr(loader, what)
            assert tensor is None or (tensor.is_contiguous() and tensor.data_ptr() in kept), f"{what} of {name}"

    @pytest.mark.parametrize("block_k", [32, 512])
    @pytest.mark.parametrize("name", SPECS)
    def test_kernels_read_the_weights_of_the_reference(self, name: str, block_k: int) -> None:
        """In tiles of any size, channels in any order; and zeros where there is nothing."""
        spec = SPECS[name]
        packed, _ = self.pack(spec, "float32")
        assert packed.tile_loader is not None
        from engine.testing.weight_tiles import BLOCK_N, read_tiles

        generator = torch.Generator().manual_seed(block_k)
        rows = torch.randperm(-(-(spec.out_features + 5) // BLOCK_N) * BLOCK_N, generator=generator).to(self.device)
        got = read_tiles(packed.tile_loader, rows, spec.out_features, spec.in_features, block_k)
        unit = torch.eye(spec.in_features, device=self.device)
        want = (packed.reference(unit) - packed.reference(torch.zeros_like(unit))).T
        real = rows < spec.out_features
        gap = (got[real, : spec.in_features] - want[rows[real]]).abs().max()
        # The reference's sum passes by the bias, which rounds it.
        assert float(gap) <= 1e-6 * (float(want.abs().max()) + 4.0 * any(part.bias for part in spec.parts))
        assert not got[~real].any() and not got[:, spec.in_features :].any()


def bits_of(tensor: Tensor) -> Tensor:
    """Comparable where the dtype itself is not, as 8-bit floats."""
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor


def about(said: int, kept: int) -> bool:
    """A model that is said to fit must; one that fits should not be refused for what a format takes at worst."""
    return kept <= said <= 1.25 * kept


def shares(spec: LinearSpec) -> tuple[LinearSpec, ...]:
    """Two ranks' of it, equal ones."""
    if spec.shard == "in":
        half = spec.in_features // 2
        rows = tuple(((0, part.out_features),) for part in spec.parts)
        first = replace(spec, in_features=half, share=Share(spec, rows, (0, half)))
        parts = tuple(replace(part, bias=False) for part in spec.parts)
        return first, replace(first, parts=parts, share=Share(spec, rows, (half, spec.in_features)))
    found = []
    for rank in range(2):
        halves = [part.out_features // 2 for part in spec.parts]
        parts = tuple(replace(part, out_features=half) for part, half in zip(spec.parts, halves, strict=True))
        own = tuple(((rank * half, (1 + rank) * half),) for half in halves)
        found.append(replace(spec, parts=parts, share=Share(spec, own)))
    return tuple(found)


def may_be_cut(stored: StoredTensor, axis: str) -> bool:
    return axis in (*stored.shard_axes, *stored.replicated) or (stored.suffix == "bias" and axis == "in")


def suite_for(subject: Subject) -> Suite:
    """For ``engine plugins check``: of what the quantizer's layers offer."""
    plain = filled(subject, [QuantizerConformance], make=lambda self: subject.build())()
    packed = {name: subject.tried(plain.pack, spec, plain.dtypes[0]) for name, spec in SPECS.items()}
    layers = {name: layer for name, made in packed.items() if made for layer in made[:1]}
    adds = tuple(name for name in ADDED if name in layers and layers[name].apply_add is not None)
    gates = tuple(name for name in GATED if name in layers and layers[name].apply_gated is not None)
    tiles = runs_triton(plain.device) and any(layer.tile_loader is not None for layer in layers.values())
    offered = {
        AddConformance: bool(adds),
        GateConformance: bool(gates),
        NativeConformance: any(layer.native is not None for layer in layers.values()),
        TileLoaderConformance: tiles,
    }
    chosen = [suite for suite, offers in offered.items() if offers] or [QuantizerConformance]
    return filled(subject, chosen, make=lambda self: subject.build(), adds=adds, gates=gates)
