"""Conformance suite for quantizers: derive a test class, say how to make yours, and run pytest.

.. code-block:: python

    class TestMine(QuantizerConformance):
        weight_error = 0.1  # of the largest weight: what 4 bits cost

        def make(self):
            return Mine(MineConfig(), build_context())

A quantizer that reads packed checkpoints overrides :meth:`QuantizerConformance.parts` to make such tensors, and
:meth:`QuantizerConformance.weights` to say which weights they stand for.

Weights with a ``tile_loader`` have a suite of their own, to inherit where Triton kernels run:
:class:`TileLoaderConformance`. The first test fails until it is.
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
    CustomWeight,
    PlainWeight,
    QuantizedWeight,
    Quantizer,
    StoredHeader,
    StoredTensor,
    Weight,
    WeightFormat,
)
from engine.kernels.linear import PackedLinear
from engine.kernels.packing import Target, pack_weight, packed_bytes
from engine.kernels.triton.device import runs_triton
from engine.models.sharding import has_bias, taken
from engine.plugin_guard.calls import lacking
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
    weight_error = 0.0
    """Accepted error of a weight, as a share of the largest weight of its part. 0 for lossless quantizers."""

    def make(self) -> Quantizer:
        """The quantizer under test."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Cases of what the quantizer offers, and no others."""
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.dtypes)

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

    def made(self, spec: LinearSpec, dtype: str) -> tuple[Weight, list[dict[str, Tensor]]]:
        """A weight and what it was made of."""
        parts = self.parts(spec, getattr(torch, dtype))
        return self.make().pack(spec, parts, getattr(torch, dtype), self.device), parts

    def pack(self, spec: LinearSpec, dtype: str) -> PackedLinear:
        """A layer as the core's kernels have it."""
        return pack_weight(spec, self.made(spec, dtype)[0], self.target(dtype))

    def target(self, dtype: str) -> Target:
        return Target(self.device, getattr(torch, dtype))

    def inputs(self, spec: LinearSpec, rows: int, dtype: str) -> Tensor:
        generator = torch.Generator().manual_seed(rows)
        return torch.randn(rows, spec.in_features, generator=generator).to(self.device, getattr(torch, dtype))

    def check_weight(self, got: Tensor, want: Tensor, what: str) -> None:
        """A weight is the checkpoint's, as nearly as the format can hold it."""
        largest = float(want.double().abs().max())
        gap = float((got.double() - want.double()).abs().max())
        accepted = self.weight_error * largest + torch.finfo(torch.float32).eps * largest
        assert gap <= accepted, f"{what}: off by {gap / largest:.4f} of the largest, weight_error = {self.weight_error}"

    def test_declares_what_the_core_plans_with(self) -> None:
        quantizer = self.make()
        assert isinstance(quantizer, Quantizer), lacking(quantizer, Quantizer)
        assert type(quantizer.lossless) is bool
        assert not (quantizer.lossless and self.weight_error), "lossless, with an accepted error"

    @pytest.mark.parametrize("name", SPECS)
    def test_a_weight_is_data_of_the_format_that_was_said(self, name: str, dtype: str) -> None:
        """Memory is planned with the format before a weight is there."""
        spec = SPECS[name]
        weight, form = self.made(spec, dtype)[0], self.make().format(spec)
        assert isinstance(weight, PlainWeight | QuantizedWeight | CustomWeight)
        assert [weight.out_features, weight.in_features] == [spec.out_features, spec.in_features]
        assert form is None or isinstance(form, WeightFormat)
        assert (form is None) == isinstance(weight, PlainWeight), f"format {form} of {type(weight).__name__}"
        assert (form is not None and form.custom) == isinstance(weight, CustomWeight), f"format {form}"
        if isinstance(weight, CustomWeight):
            assert all(tensor.is_contiguous() for tensor in weight.tensors.values()), "not contiguous"
        if not isinstance(weight, QuantizedWeight) or form is None:
            return
        assert (form.bits, form.floating) == (weight.bits, weight.floating)
        assert min(form.group_size, spec.in_features) == min(weight.group_size, spec.in_features)
        assert (form.zeros or weight.zero is None) and (form.ordered or weight.order is None)
        assert form.input_quant == weight.input_quant

    @pytest.mark.parametrize("name", SPECS)
    def test_a_weight_is_the_checkpoints(self, name: str, dtype: str) -> None:
        spec = SPECS[name]
        weight, parts = self.made(spec, dtype)
        read = torch.split(dense(weight), [part.out_features for part in spec.parts])
        for part, got, want in zip(spec.parts, read, self.weights(parts), strict=True):
            self.check_weight(got, want, part.name)

    @pytest.mark.parametrize("name", SPECS)
    def test_kernels_multiply_by_the_weight_for_any_number_of_rows(self, name: str, dtype: str) -> None:
        spec = SPECS[name]
        packed = self.pack(spec, dtype)
        for rows in self.rows:
            x = self.inputs(spec, rows, dtype)
            want, got = packed.reference(x), packed.apply(x)
            assert got.shape == want.shape == (rows, spec.out_features)
            assert got.dtype == want.dtype == x.dtype and got.is_contiguous()
            gap = float((got.double() - want.double()).abs().max() / want.double().abs().max())
            assert gap <= DTYPES[dtype], f"{rows} rows: {gap:.1e}"

    @pytest.mark.parametrize("stored", ["float32", "bfloat16"])
    def test_the_checkpoint_may_be_in_another_dtype_and_stays_as_it_is(self, stored: str, dtype: str) -> None:
        """It may be shared, as a tied embedding is."""
        spec = SPECS["qkv_with_bias"]
        parts = self.parts(spec, getattr(torch, stored))
        kept = [{suffix: tensor.clone() for suffix, tensor in part.items()} for part in parts]
        weight = self.make().pack(spec, parts, getattr(torch, dtype), self.device)
        for part, was in zip(parts, kept, strict=True):
            assert all(torch.equal(bits_of(part[suffix]), bits_of(tensor)) for suffix, tensor in was.items())
        want = torch.split(dense(weight), [part.out_features for part in spec.parts])
        for got, expected in zip(want, self.weights(parts), strict=True):
            self.check_weight(got, expected, f"{stored} as {dtype}")
        packed, x = pack_weight(spec, weight, self.target(dtype)), self.inputs(spec, 3, dtype)
        assert packed.apply(x).dtype == x.dtype

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
            weight = self.make().pack(share, mine, getattr(torch, dtype), self.device)
            read = torch.split(dense(weight), [part.out_features for part in share.parts])
            for part, got, full in zip(spec.parts, read, weights, strict=True):
                want = full.chunk(2, 0 if axis == "out" else 1)[rank]
                assert got.shape == want.shape, f"{part.name}: {list(got.shape)} of rank {rank}, cut along {axis}"
                self.check_weight(got, want, f"{part.name} of rank {rank}, cut along {axis}")
            wanted = []
            for whole_part, of_share, held in zip(parts, share.parts, mine, strict=True):
                bias = whole_part["bias"].float() if "bias" in held else torch.zeros(of_share.out_features)
                wanted.append(bias.chunk(2)[rank] if "bias" in held and axis == "out" else bias)
            assert torch.equal(bias_of(weight), torch.cat(wanted))

    @pytest.mark.parametrize("name", ["qkv_with_bias", "bias_on_some_parts"])
    def test_a_bias_is_added_to_its_own_part_only(self, name: str) -> None:
        spec, dtype = SPECS[name], self.dtypes[0]
        weight, parts = self.made(spec, dtype)
        none = [torch.zeros(part.out_features) for part in spec.parts]
        want = torch.cat([tensors.get("bias", zeros).float() for tensors, zeros in zip(parts, none, strict=True)])
        assert torch.allclose(bias_of(weight), want, atol=1e-6)

    def test_fusing_parts_changes_no_part(self) -> None:
        spec, dtype = SPECS["qkv_with_bias"], self.dtypes[0]
        fused, parts = self.made(spec, dtype)
        alone = [
            self.make().pack(LinearSpec((part,), spec.in_features), [tensors], getattr(torch, dtype), self.device)
            for part, tensors in zip(spec.parts, parts, strict=True)
        ]
        assert torch.equal(dense(fused), torch.cat([dense(one) for one in alone]))

    @pytest.mark.parametrize("axis", CUT)
    def test_the_bytes_that_follow_from_its_format_are_those_that_are_kept(self, axis: str, dtype: str) -> None:
        """The core decides by them whether a model fits, before anything is loaded."""
        spec = CUT[axis]
        said = packed_bytes(spec, self.make().format(spec), self.target(dtype))
        kept = self.pack(spec, dtype).num_bytes
        assert about(said, kept), f"{said} bytes follow from the format, {kept} are kept"

    def test_a_tied_head_stays_shared_if_it_stays_plain(self) -> None:
        """The embedding is in memory already: what shares it takes nothing."""
        spec, dtype, quantizer = SPECS["head"], self.dtypes[0], self.make()
        compute = getattr(torch, dtype)
        parts = self.parts(spec, compute)
        if quantizer.format(spec) is not None or set(parts[0]) != {"weight"} or parts[0]["weight"].dtype != compute:
            return
        tied = parts[0]["weight"].to(self.device)
        packed = pack_weight(spec, quantizer.pack(spec, [{"weight": tied}], compute, self.device), self.target(dtype))
        assert all(tensor.data_ptr() == tied.data_ptr() for tensor in packed.tensors.values())

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

    def test_the_suite_of_what_it_offers_is_inherited(self, dtype: str) -> None:
        layers = [self.pack(spec, dtype) for spec in SPECS.values()]
        loads = runs_triton(self.device) and any(layer.tile_loader is not None for layer in layers)
        assert loads == isinstance(self, TileLoaderConformance), f"a tile loader: {loads}, or TileLoaderConformance"

    def test_it_says_what_it_stores(self) -> None:
        spec = SPECS["one_part"]
        _, parts = self.made(spec, self.dtypes[0])
        suffixes = {stored.suffix for stored in self.make().stored(spec)}
        required = {stored.suffix for stored in self.make().stored(spec) if not stored.optional}
        assert required <= parts[0].keys() <= suffixes


class TileLoaderConformance(QuantizerConformance):
    """For quantizers whose layers have a ``tile_loader``. Kernels run on a CUDA device, or anywhere with
    ``TRITON_INTERPRET=1`` set before triton is first imported."""

    @pytest.mark.parametrize("name", ["qkv_with_bias", "wide_input", "head"])
    def test_kernels_read_the_tensors_that_the_layer_keeps(self, name: str, dtype: str) -> None:
        """Copies would take memory that nobody has planned."""
        packed = self.pack(SPECS[name], dtype)
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
        packed = self.pack(spec, "float32")
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


def dense(weight: Weight) -> Tensor:
    """float32 ``[out, in]`` on the CPU: the weights it stands for."""
    if isinstance(weight, PlainWeight):
        return weight.weight.float().cpu()
    return (weight.dense(weight.tensors) if isinstance(weight, CustomWeight) else weight.dense()).cpu()


def bias_of(weight: Weight) -> Tensor:
    """float32 ``[out]``"""
    return torch.zeros(weight.out_features) if weight.bias is None else weight.bias.float().cpu()


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
    """For ``engine plugins check``: with that of tile loaders, where they are read."""
    plain = filled(subject, [QuantizerConformance], make=lambda self: subject.build())()
    packed = [subject.tried(plain.pack, spec, plain.dtypes[0]) for spec in SPECS.values()]
    tiles = runs_triton(plain.device) and any(layer is not None and layer.tile_loader is not None for layer in packed)
    chosen = TileLoaderConformance if tiles else QuantizerConformance
    return filled(subject, [chosen], make=lambda self: subject.build())
