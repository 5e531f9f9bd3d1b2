"""Keys and values in float8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from engine.contracts.config import SlotConfig
from engine.contracts.provider import BuildContext

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = torch.finfo(torch.float8_e4m3fn).max


class FP8Format:
    """e4m3 (arXiv 2209.05433) with one scale per layer and head, the checkpoint's or 1: half the bytes of 16 bits.

    See :class:`engine.contracts.kv_format.KVFormat`. Numbers beyond 448 times the scale become that.
    """

    scale: Literal["none", "per_layer_head", "per_token_head"] = "per_layer_head"
    lossless = False

    def __init__(self, config: SlotConfig, context: BuildContext) -> None:
        pass

    def storage_dtype(self, compute_dtype: str) -> str:
        return "float8_e4m3fn"

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        # Without the clamp, too large a number would be NaN in some releases of torch.
        return (x.float() / scale[..., None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)

    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        assert scale is not None
        return x.float().mul_(scale[..., None]).to(dtype)

    def load_tile(self) -> Any:
        from engine_plugins.kv_format.tiles import load_e4m3

        return load_e4m3

    def store_tile(self) -> Any:
        from engine_plugins.kv_format.tiles import store_e4m3

        return store_e4m3
