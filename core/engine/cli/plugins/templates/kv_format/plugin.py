"""KV format ``mine``: keys and values as they are, or in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from engine.contracts.config import SlotConfig, one_of
from engine.contracts.provider import BuildContext, Provider
from engine.hookspecs import hookimpl

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MineKVFormatConfig(SlotConfig):
    """The keys ``kv_format.<field>``."""

    storage: str = "auto"
    """``auto`` (the compute dtype) or ``bfloat16``."""

    def __post_init__(self) -> None:
        one_of("kv_format.storage", self.storage, ("auto", "bfloat16"))


@hookimpl
def engine_kv_format() -> list[Provider]:
    return [
        Provider(
            "mine",
            "engine.cli.plugins.templates.kv_format.plugin:MineKVFormat",
            config=MineKVFormatConfig,
            doc="Keys and values in the compute dtype or in bfloat16.",
        )
    ]


class MineKVFormat:
    """The layout of the cache is the core's; this says of which type an element is, and how it gets there."""

    scale: Literal["none", "per_layer_head", "per_token_head"] = "none"
    """Whether scales are kept beside the cache; what is stored times its scale is what was written."""

    def __init__(self, config: MineKVFormatConfig, context: BuildContext) -> None:
        self._storage = config.storage
        self.lossless = config.storage == "auto"
        """Whether :meth:`unpack` gives back, bit for bit, what :meth:`pack` was given."""

    def storage_dtype(self, compute_dtype: str) -> str:
        """Name of the torch dtype of what is stored, for this compute dtype."""
        return compute_dtype if self._storage == "auto" else self._storage

    def pack(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """``[num_tokens, num_kv_heads, head_dim]`` to the storage dtype; what is too large becomes its largest."""
        if self._storage == "auto":
            return x  # the compute dtype and no scale: kernels use the cache without asking
        import torch  # here, or listing the plugin would load it

        largest = torch.finfo(torch.bfloat16).max
        return x.float().clamp(-largest, largest).to(torch.bfloat16)

    def unpack(self, x: Tensor, scale: Tensor | None, dtype: Any) -> Tensor:
        """The inverse of :meth:`pack`, to the torch dtype ``dtype``."""
        return x.to(dtype)

    def load_tile(self) -> Any | None:
        """A Triton function that loads a tile; ``None``: a plain load and a cast are right."""
        return None

    def store_tile(self) -> Any | None:
        """A Triton function that stores what :meth:`pack` would; ``None``: a plain store and a cast are right."""
        return None
