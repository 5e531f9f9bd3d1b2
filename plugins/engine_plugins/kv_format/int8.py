"""Keys and values in 8-bit integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from engine.contracts.config import SlotConfig
from engine.contracts.provider import BuildContext

if TYPE_CHECKING:
    from torch import Tensor


class Int8Format:
    """255 levels between plus and minus the largest element of each token's head, with a float32 scale for each.

    See :class:`engine.contracts.kv_format.KVFormat`. A head of 64 takes 68 bytes.
    """

    scale: Literal["none", "per_layer_head", "per_token_head"] = "per_token_head"
    lossless = False

    def __init__(self, config: SlotConfig, context: BuildContext) -> None:
        pass

    def storage_dtype(self, compute_dtype: str) -> str:
        return "int8"

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        assert scale is not None
        return (x.float() / scale[..., None]).round_().clamp_(-127.0, 127.0).to(torch.int8)

    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        assert scale is not None
        return x.float().mul_(scale[..., None]).to(dtype)

    def load_tile(self) -> Any:
        from engine_plugins.kv_format.tiles import load_int8

        return load_int8

    def store_tile(self) -> Any:
        from engine_plugins.kv_format.tiles import store_int8

        return store_int8
