"""Conformance suite for KV formats: derive a test class, say how to make yours, and run pytest.

.. code-block:: python

    class TestMine(KVFormatConformance):
        error = 0.01  # of the largest element of a token's head

        def make(self):
            return Mine(MineConfig(), build_context())

A format with functions for kernels inherits :class:`KVTileConformance` instead, which runs them: on a CUDA device, or
anywhere with ``TRITON_INTERPRET=1`` set before triton is first imported. A whole attention kernel on the format is
tested by passing it to :func:`engine.testing.attention_cases.measure`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.contracts.kv_format import KVFormat
from engine.kernels.storage import as_bits, largest_value
from engine.kernels.triton.device import runs_triton
from engine.kv.cache import storage_of
from engine.plugin_guard.calls import lacking
from engine.startup.checks.kv_format import check_kv_format, fitting_scale
from engine.testing.subject import Subject, Suite, filled

COMPUTE = ("float32", "bfloat16", "float16")
SHAPES = ((1, 1, 8), (3, 2, 80), (17, 8, 128))
"""``(num_tokens, num_kv_heads, head_dim)``"""


class KVFormatConformance:
    """What the core relies on."""

    device = "cpu"
    error = 0.0
    """Accepted error of an element, as a share of the largest in its token and head. 0 for lossless formats."""

    def make(self) -> KVFormat:
        """The format under test."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def scale_of(self, x: Tensor) -> Tensor | None:
        """The scale the format packs ``x`` with: float32 ``[num_kv_heads]`` or ``[num_tokens, num_kv_heads]``.

        The default brings the largest element to the storage dtype's largest number.
        """
        kv_format = self.make()
        return fitting_scale(kv_format, x, storage_of(kv_format, str(x.dtype).removeprefix("torch.")))

    def sample(self, shape: tuple[int, int, int], compute: str) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(shape, generator=generator).to(self.device, getattr(torch, compute))

    def test_declares_what_the_cache_is_made_of(self) -> None:
        kv_format = self.make()
        assert isinstance(kv_format, KVFormat), lacking(kv_format, KVFormat)
        assert kv_format.scale in ("none", "per_layer_head", "per_token_head"), f"scale = {kv_format.scale!r}"
        assert type(kv_format.lossless) is bool
        for compute in COMPUTE:
            name = kv_format.storage_dtype(compute)
            assert isinstance(getattr(torch, name, None), torch.dtype), f"storage_dtype({compute!r}) = {name!r}"

    @pytest.mark.parametrize("compute", COMPUTE)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_what_is_packed_can_be_read_back(self, shape: tuple[int, int, int], compute: str) -> None:
        """As at start, and as near as the format says. What is stored as it is kernels use without asking."""
        kv_format, x = self.make(), self.sample(shape, compute)
        check_kv_format(kv_format, *shape[1:], x.dtype, self.device)
        scale = self.scale_of(x)
        back = kv_format.unpack(kv_format.pack(x, scale), scale, x.dtype)
        if kv_format.lossless or (scale is None and kv_format.storage_dtype(compute) == compute):
            assert torch.equal(back, x), "other numbers came back"
        else:
            gap = float(((back.double() - x.double()).abs() / x.double().abs().amax(-1, keepdim=True)).max())
            assert gap <= self.error, f"off by {gap:.4f} of the largest element of a token's head, error = {self.error}"

    @pytest.mark.parametrize("compute", COMPUTE)
    def test_packing_what_was_read_back_changes_nothing(self, compute: str) -> None:
        """Or blocks that move between tiers, or are recomputed, would drift."""
        kv_format, x = self.make(), self.sample(SHAPES[1], compute)
        scale = self.scale_of(x)
        packed = kv_format.pack(x, scale)
        again = kv_format.pack(kv_format.unpack(packed, scale, torch.float32), scale)
        assert torch.equal(as_bits(again.to(packed.dtype)), as_bits(packed))

    def test_tokens_are_packed_one_by_one(self) -> None:
        """A token's stored bytes may not depend on which tokens came with it: prefix hits mix them."""
        kv_format, x = self.make(), self.sample(SHAPES[2], "float32")
        scale = self.scale_of(x)
        whole = kv_format.pack(x, scale)
        for i in range(len(x)):
            own = scale[i : i + 1] if kv_format.scale == "per_token_head" and scale is not None else scale
            assert torch.equal(as_bits(kv_format.pack(x[i : i + 1], own)[0]), as_bits(whole[i]))

    def test_keys_may_be_a_view_of_a_fused_projection(self) -> None:
        """The core hands over the key heads among those of queries, keys and values."""
        kv_format, x = self.make(), self.sample(SHAPES[1], "float32")
        fused = torch.cat([x + 1.0, x, x - 1.0], dim=1)
        view, scale = fused[:, x.shape[1] : 2 * x.shape[1]], self.scale_of(x)
        assert torch.equal(as_bits(kv_format.pack(view, scale)), as_bits(kv_format.pack(x, scale)))

    @pytest.mark.parametrize("compute", COMPUTE)
    def test_inputs_are_left_alone(self, compute: str) -> None:
        """Keys are attended to after they were stored, also those that are too large for the cache."""
        kv_format, x = self.make(), 0.25 * self.sample(SHAPES[1], compute)
        scale = self.scale_of(x)
        x[0] = torch.finfo(x.dtype).max
        kept_x, kept_scale = x.clone(), None if scale is None else scale.clone()
        packed = kv_format.pack(x, scale)
        kept_packed = as_bits(packed).clone()
        kv_format.unpack(packed, scale, torch.float32)
        kv_format.unpack(packed, scale, x.dtype)
        assert torch.equal(x, kept_x), "pack changed the keys"
        assert scale is None or (kept_scale is not None and torch.equal(scale, kept_scale)), "the scales were changed"
        assert torch.equal(as_bits(packed), kept_packed), "unpack changed what is stored"

    def test_zeros_stay_zeros(self) -> None:
        kv_format = self.make()
        x = torch.zeros(SHAPES[1], device=self.device)
        ones = self.scale_of(torch.ones_like(x))
        assert not kv_format.unpack(kv_format.pack(x, ones), ones, torch.float32).any()

    def test_what_is_stored_times_its_scale_is_what_was_written(self) -> None:
        """Kernels multiply scores and probabilities by scales instead of keys and values."""
        kv_format, x = self.make(), self.sample(SHAPES[1], "float32")
        scale = self.scale_of(x)
        if scale is not None:
            packed = kv_format.pack(x, scale)
            want = packed.double() * scale[..., None].double()
            gap = (kv_format.unpack(packed, scale, torch.float32).double() - want).abs()
            assert float(gap.max()) <= 1e-6 * float(want.abs().max())

    @pytest.mark.parametrize("compute", COMPUTE)
    def test_numbers_beyond_the_range_become_the_largest(self, compute: str) -> None:
        """A checkpoint's scales do not foresee every prompt, and a format without any foresees nothing."""
        kv_format, x = self.make(), self.sample(SHAPES[1], compute)
        scale, storage = self.scale_of(x), getattr(torch, kv_format.storage_dtype(compute))
        is_narrower = largest_value(storage) < torch.finfo(x.dtype).max
        if scale is None and not is_narrower:
            return
        largest = torch.full_like(x, torch.finfo(x.dtype).max)
        for beyond in (8.0 * x, largest, -largest):
            back = kv_format.unpack(kv_format.pack(beyond, scale), scale, torch.float32).abs()
            assert bool(back.isfinite().all()), f"{beyond.abs().max()} was stored as NaN or infinity"
            if scale is None:
                assert bool((back <= largest_value(storage)).all())
                continue
            axes = (-1,) if kv_format.scale == "per_token_head" else (0, 2)
            limit = x.float().abs().amax(axes, keepdim=True)
            assert bool((back <= 1.001 * limit).all())
            outside = beyond.float().abs() > limit
            assert bool((back >= 0.9 * limit)[outside].all()), "a number that is too large became a small one"

    @pytest.mark.parametrize("compute", COMPUTE)
    def test_storage_that_a_plain_load_cannot_read_has_a_kernel_function(self, compute: str) -> None:
        """Compiled kernels read the bits of 8-bit floats as integers. Scales they multiply themselves."""
        kv_format, x = self.make(), self.sample(SHAPES[1], compute)
        packed = kv_format.pack(x, self.scale_of(x))
        if as_bits(packed) is not packed:
            assert kv_format.load_tile() is not None, "8-bit floats need a load_tile()"
        elif kv_format.scale == "none" and kv_format.load_tile() is None:
            assert torch.equal(kv_format.unpack(packed, None, x.dtype), packed.to(x.dtype))
        if kv_format.scale == "none" and kv_format.store_tile() is None:
            assert torch.equal(as_bits(packed), as_bits(x.to(packed.dtype)))

    def test_its_kernel_functions_are_the_same_at_every_call(self) -> None:
        """Kernels are compiled for them, once."""
        kv_format = self.make()
        assert kv_format.load_tile() is kv_format.load_tile()
        assert kv_format.store_tile() is kv_format.store_tile()


class KVTileConformance(KVFormatConformance):
    """For formats with functions for kernels, both ``load_tile`` and ``store_tile``."""

    @pytest.mark.parametrize("compute", COMPUTE)
    def test_its_load_function_gives_what_is_stored_unscaled_and_zeros_elsewhere(self, compute: str) -> None:
        kv_format, x = self.make(), self.sample(SHAPES[1], compute)
        load_tile = kv_format.load_tile()
        assert load_tile is not None
        from engine.testing.kv_tiles import load_all

        packed = kv_format.pack(x, self.scale_of(x)).contiguous()
        got = load_all(as_bits(packed), load_tile, x.dtype, count=100)
        assert torch.equal(got[:100], packed.flatten()[:100].to(x.dtype)) and not got[100:].any()

    @pytest.mark.parametrize("compute", COMPUTE)
    def test_its_store_function_writes_the_bytes_of_pack_and_nothing_else(self, compute: str) -> None:
        kv_format, x = self.make(), self.sample(SHAPES[1], compute)
        store_tile = kv_format.store_tile()
        assert store_tile is not None
        from engine.testing.kv_tiles import store_all

        scale = self.scale_of(x)
        packed = as_bits(kv_format.pack(x, scale).contiguous()).flatten()
        each = torch.ones_like(x, dtype=torch.float32) if scale is None else scale[..., None].expand(x.shape)
        untouched = torch.full_like(packed, 77)
        got = store_all(untouched, store_tile, x.flatten(), each.flatten(), count=100)
        assert torch.equal(got[:100], packed[:100]) and bool((got[100:] == 77).all())

    def test_its_store_function_rounds_what_lies_between_two_numbers_as_pack_does(self) -> None:
        """Or a block would hold other bytes when another kernel wrote it. Among the multiples of a half there are some
        in the middle of two numbers of any 8-bit format."""
        kv_format = self.make()
        store_tile = kv_format.store_tile()
        assert store_tile is not None
        from engine.testing.kv_tiles import store_all

        x = (torch.arange(256, device=self.device) / 2.0 - 63.5).reshape(1, 2, 128) * 2.0**-6
        scale = None if kv_format.scale == "none" else torch.full((1, 2), 2.0**-6, device=self.device)
        if scale is not None and kv_format.scale == "per_layer_head":
            scale = scale[0]
        packed = as_bits(kv_format.pack(x, scale).contiguous()).flatten()
        each = torch.ones_like(x) if scale is None else scale[..., None].expand(x.shape)
        got = store_all(torch.empty_like(packed), store_tile, x.flatten(), each.flatten(), count=x.numel())
        assert torch.equal(got, packed)


def suite_for(subject: Subject) -> Suite:
    """For ``engine plugins check``: of what the format offers."""

    def has_functions() -> bool:
        made = subject.build()
        return made.load_tile() is not None and made.store_tile() is not None

    tiles = runs_triton(subject.device) and subject.tried(has_functions)
    return filled(subject, [KVTileConformance if tiles else KVFormatConformance], make=lambda self: subject.build())
