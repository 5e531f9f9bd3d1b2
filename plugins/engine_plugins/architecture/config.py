"""What the built-in architectures compute (readable without importing one)."""

from __future__ import annotations

from typing import Literal

LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""First entry of ``architectures`` in ``config.json``."""
ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""``hidden_act`` of ``config.json`` -> the activation of the typed op."""
