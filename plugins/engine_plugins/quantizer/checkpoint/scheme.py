"""How a linear layer is stored, in words that all formats share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Activations = Literal["bf16", "int8", "fp8"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to store a linear layer, that of a format with all its options decided.

    ``layout``: the tensors it has. ``plain``: a code in a byte or an e4m3 number; ``packed``: 4- or 8-bit codes in
    words along the input; ``awq`` and ``gptq``: in words as these libraries have them; ``mxfp4``: e2m1 numbers and
    powers of two.
    """

    method: str
    layout: Literal["plain", "packed", "awq", "gptq", "mxfp4"]
    bits: int
    granularity: Literal["tensor", "channel", "group", "block"]
    """What shares a scale. ``channel``: an output feature; ``group``: some inputs of one; ``block``: some outputs and
    inputs."""
    floating: bool = False
    """e4m3 numbers, of 4 bits e2m1; otherwise integers."""
    block: tuple[int, int] = (1, 0)
    """Output and input features that share a scale; with ``group`` as with ``block``."""
    spaced: bool = False
    """The scales of blocks have an axis of one entry after each of their two."""
    symmetric: bool = True
    ordered: bool = False
    """Input features are grouped by importance (activation order), as a tensor of group indices says."""
    scale_names: tuple[str, ...] = ("weight_scale",)
    """The scale is the first of these that is there."""
    activations: Activations = "bf16"
    """What the checkpoint was made for."""
    stored_zeros_less_one: bool = False
    """gptq: the first version of the format stores zero points less one."""

    def group_size(self, in_features: int) -> int:
        """Input features that share a scale."""
        return min(self.block[1], in_features) if self.granularity in ("group", "block") else in_features

    def groups(self, in_features: int) -> int:
        return -(-in_features // self.group_size(in_features))

    @property
    def scale_bytes(self) -> int:
        """What a scale takes in GPU kernels, at most."""
        return 1 if self.layout == "mxfp4" else 4

    @property
    def codes_per_word(self) -> int:
        """Codes in 32 bits."""
        return 32 // self.bits

    @property
    def in_words(self) -> bool:
        """Outputs share 32-bit words."""
        return self.layout in ("awq", "gptq")

    @property
    def label(self) -> str:
        """For the plan: ``awq group 128``."""
        shared = {"group": f"group {self.block[1]}", "block": f"{self.block[0]}x{self.block[1]} blocks"}
        words = [self.method, shared.get(self.granularity, f"per {self.granularity}")]
        if not self.symmetric:
            words.append("with zero points")
        if self.ordered:
            words.append("in activation order")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a checkpoint says of its quantization."""

    method: str
    scheme_of: Callable[[str, bool], Scheme | None]
    """``(name of a linear layer, whether it is the head)``; ``None``: the layer is not quantized."""
    schemes: tuple[Scheme, ...] = ()
    """All that occur."""
    has_kv_scales: bool = True
    """Scales for keys and values, where there are any, are for float8."""
    problems: tuple[str, ...] = ()


def grouped(group_size: int) -> tuple[Literal["channel", "group"], tuple[int, int]]:
    """``granularity`` and ``block`` for a group size as checkpoints write it: -1 is one group for all inputs."""
    return ("channel", (1, 0)) if group_size == -1 else ("group", (1, group_size))
