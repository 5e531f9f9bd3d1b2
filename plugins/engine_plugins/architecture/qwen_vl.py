"""The text models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3.

Their rotation takes three positions of a token, in time, height and width; those of text are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.checkpoint.values import Values
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder
from engine.contracts.model import ModelConfig
from engine_plugins.architecture.llama import decoder
from engine_plugins.architecture.nested import text_model, text_part

QWEN2: dict[str, Any] = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    "max_window_layers": 80, "rope_theta": 1e6,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000,
    "rope_theta": 5e5,
}  # fmt: skip
"""What ``config.json`` may leave out."""


class QwenVLArchitecture:
    """See :class:`engine.contracts.architecture.Architecture`."""

    def __init__(self, config: SlotConfig) -> None:
        pass

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return text_part(config)

    def describe(self, model: ModelConfig, b: Builder) -> None:
        third = model.architecture == "Qwen3VLForConditionalGeneration"
        values = Values({**(QWEN3 if third else QWEN2), **model.raw})
        for key in ("rope_scaling", "rope_parameters"):
            rope = values.section(key)
            if rope.text("rope_type", rope.text("type", "default")) == "mrope":
                values = Values({**values.values, key: {**rope.values, "rope_type": "default"}})
        name, head = text_model(b, old="model")
        decoder(b, values, "Qwen3ForCausalLM" if third else "Qwen2ForCausalLM", name, head)
