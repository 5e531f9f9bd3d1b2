"""Keys and values in the compute dtype, unscaled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from engine.contracts.config import SlotConfig
from engine.contracts.provider import BuildContext

if TYPE_CHECKING:
    from torch import Tensor


class NativeFormat:
    """See :class:`engine.contracts.kv_format.KVFormat`."""

    scale: Literal["none", "per_layer_head", "per_token_head"] = "none"
    lossless = True

    def __init__(self, config: SlotConfig, context: BuildContext) -> None:
        pass

    def storage_dtype(self, compute_dtype: str) -> str:
        return compute_dtype

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return x

    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        return x.to(dtype)

    def load_tile(self) -> None:
        return None

    def store_tile(self) -> None:
        return None
