"""Formats of cached keys and values with a bug each."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from engine.contracts.config import SlotConfig
from engine.testing.context import build_context
from engine.testing.kv_format import KVFormatConformance
from engine_plugins.kv_format.fp8 import LARGEST, FP8Format
from engine_plugins.kv_format.int8 import Int8Format
from engine_plugins.kv_format.native import NativeFormat
from tests.testing.mutants.mutant import OnPlugin, correct, mutant

Scale = Literal["none", "per_layer_head", "per_token_head"]


class Suite(OnPlugin, KVFormatConformance):
    def make(self) -> Any:
        return self.plugin(SlotConfig(), build_context())


class Int8Suite(Suite):
    error = 0.5 / 127 + 2.0**-8


class FP8Suite(Suite):
    error = 2.0**-4 + 2.0**-8


class Halves(NativeFormat):
    """float16 without scales: a correct format."""

    lossless = False

    def storage_dtype(self, compute_dtype: str) -> str:
        return "float16"

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return x.float().clamp(-65504.0, 65504.0).half()


class Unscaled(FP8Format):
    """float8 without scales: a correct format."""

    scale: Scale = "none"

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return x.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)

    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        return x.to(dtype)


class HalvesSuite(Suite):
    error = 2.0**-10


class DitherSuite(Suite):
    error = 1.0 / 127 + 2.0**-8


correct(HalvesSuite, Halves)
correct(FP8Suite, Unscaled)


@mutant(HalvesSuite, "test_numbers_beyond_the_range_become_the_largest")
class NoClamp(Halves):
    """Casts to float16 without a clamp: what is too large becomes infinity."""

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return x.half()


@mutant(HalvesSuite, "test_numbers_beyond_the_range_become_the_largest")
class ClampInTheComputeDtype(Halves):
    """Clamps to 65504 in bfloat16, where that is 65536, which float16 does not have."""

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return x.clamp(-65504.0, 65504.0).half()


@mutant(HalvesSuite, "test_inputs_are_left_alone")
class ClampInPlace(Halves):
    """Clamps the keys themselves, which attention reads after."""

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return x.clamp_(-65504.0, 65504.0).half()


@mutant(FP8Suite, "test_inputs_are_left_alone")
class ClampInPlaceInFloat32(Unscaled):
    """Clamps a copy, which ``float()`` makes of 16-bit keys and not of float32 ones."""

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return x.float().clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


@mutant(Int8Suite, "test_numbers_beyond_the_range_become_the_largest")
class Wraps(Int8Format):
    """Casts to int8 without a clamp: what is too large wraps around."""

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        return (x.float() / scale[..., None]).round().to(torch.int32).to(torch.int8)


@mutant(Int8Suite, "test_inputs_are_left_alone")
class DividesInPlace(Int8Format):
    """Divides float32 keys by their scales in place."""

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        return x.float().div_(scale[..., None]).round_().clamp_(-127.0, 127.0).to(torch.int8)


@mutant(Int8Suite, "test_inputs_are_left_alone")
class KeepsTheReciprocal(Int8Format):
    """Inverts the scales in place to multiply by them."""

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        return (x.float() * scale.reciprocal_()[..., None]).round_().clamp_(-127.0, 127.0).to(torch.int8)


@mutant(Int8Suite, "test_what_is_packed_can_be_read_back")
class Truncates(Int8Format):
    """Cuts off fractions instead of rounding."""

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        return (x.float() / scale[..., None]).clamp_(-127.0, 127.0).to(torch.int8)


@mutant(Int8Suite, "test_what_is_packed_can_be_read_back", "test_what_is_stored_times_its_scale_is_what_was_written")
class ForgetsTheScale(Int8Format):
    """Gives back what is stored without its scale."""

    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        return x.to(dtype)


@mutant(Int8Suite, "test_what_is_packed_can_be_read_back")
class AlwaysFloat32(Int8Format):
    """Gives float32 back whatever dtype is asked for."""

    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        return super().unpack(x, scale, torch.float32)


@mutant(Int8Suite, "test_what_is_packed_can_be_read_back")
class UnsignedBytes(Int8Format):
    """Stores bytes of another dtype than it says."""

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return super().pack(x, scale).view(torch.uint8)


@mutant(DitherSuite, "test_tokens_are_packed_one_by_one")
class RoundsAtRandom(Int8Format):
    """Rounds up or down at random: a block that is computed again holds other bytes."""

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        levels = x.float() / scale[..., None]
        return (levels + 0.98 * (torch.rand_like(levels) - 0.5)).round_().clamp_(-127.0, 127.0).to(torch.int8)


@mutant(Int8Suite, "test_inputs_are_left_alone")
class UnpacksInPlace(Int8Format):
    """Takes the sign off what is stored while it reads it."""

    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        sign = x.sign()
        return super().unpack(x.abs_(), scale, dtype) * sign.to(dtype)


@mutant(Int8Suite, "test_what_is_packed_can_be_read_back")
class OneScaleForAllHeads(Int8Format):
    """Packs every head of a token with the scale of its first head."""

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        return super().pack(x, scale[..., :1].expand_as(scale))


@mutant(Int8Suite, "test_zeros_stay_zeros", "test_what_is_stored_times_its_scale_is_what_was_written")
class MiddleOfTheStep(Int8Format):
    """Reads a level back as the middle of its step: zero is none of its numbers."""

    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        assert scale is not None
        return ((x.float() + 0.25) * scale[..., None]).to(dtype)


@mutant(Int8Suite, "test_declares_what_the_cache_is_made_of")
class UnknownScale(Int8Format):
    """Names a granularity that there is not."""

    scale: Any = "per_token"


@mutant(Suite, "test_declares_what_the_cache_is_made_of")
class ShortName(NativeFormat):
    """Names its storage dtype as a checkpoint does, not as torch does."""

    def storage_dtype(self, compute_dtype: str) -> str:
        return {"bfloat16": "bf16", "float16": "fp16"}.get(compute_dtype, compute_dtype)


@mutant(Suite, "test_what_is_packed_can_be_read_back")
class SaysLossless(Halves):
    """Claims to be lossless because most numbers come back."""

    lossless = True


@mutant(Int8Suite, "test_its_kernel_functions_are_the_same_at_every_call")
class NewFunctionEachTime(Int8Format):
    """Makes its kernel function anew at every call, so that kernels are compiled in every step."""

    def load_tile(self) -> Any:
        return lambda: None


@mutant(FP8Suite, "test_storage_that_a_plain_load_cannot_read_has_a_kernel_function")
class BitsAsNumbers(Unscaled):
    """Has no kernel function for 8-bit floats, whose bits compiled kernels then take for integers."""

    def load_tile(self) -> Any:
        return None


@mutant(Int8Suite, "test_keys_may_be_a_view_of_a_fused_projection")
class ReadsFlatMemory(Int8Format):
    """Reads keys as flat memory, where they lie among queries and values."""

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return super().pack(x.as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1)), scale)


@mutant(FP8Suite, "test_packing_what_was_read_back_changes_nothing")
class RoundsUp(Unscaled):
    """Rounds away from zero: a key that is stored again grows."""

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return super().pack(x * (1.0 + 2.0**-4), scale)


@mutant(
    Int8Suite,
    missed="only the functions for kernels round what lies between two levels: their suite, which runs Triton, sees it",
)
class HalvesAwayFromZero(Int8Format):
    """Rounds halves away from zero in ``pack``, and to even in its kernel function."""

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        levels = x.float() / scale[..., None]
        return (levels.sign() * (levels.abs() + 0.5).floor()).clamp_(-127.0, 127.0).to(torch.int8)
