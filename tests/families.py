"""Facts and graphs of checkpoints, by the built-in architectures; and an architecture of somebody else's."""

from typing import Any

from engine.assembly.model_config import model_config
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Builder, Graph
from engine.contracts.model import ModelConfig, ModelFacts
from engine.contracts.ops import LinearPart
from engine.models.record import facts, recorded
from engine_plugins.architecture.llama import LlamaArchitecture

LLAMA = LlamaArchitecture(SlotConfig())


def model_facts(path: str) -> ModelFacts:
    """Of a Llama-like checkpoint."""
    return facts(LLAMA, model_config(path))


def model_graph(path: str) -> Graph:
    """Of a Llama-like checkpoint."""
    return recorded(LLAMA, model_config(path))


class AnyFamily:
    """An architecture that computes one small model, whatever ``config.json`` says."""

    def __init__(self, config: SlotConfig) -> None:
        self.config = config

    def describe(self, model: ModelConfig, b: Builder) -> None:
        b.positions(64)
        x = b.embed("embed", vocab_size=16, size=8)
        with b.layer(x):
            q, k, v = b.linear(x, LinearPart("q", 8), LinearPart("k", 4), LinearPart("v", 4))
            x = b.add(x, b.attention(q, k, v, head_dim=4))
        b.lm_head(x, "head", 16)


class NestedFamily(AnyFamily):
    """The same, of checkpoints with a part for text."""

    def text_config(self, config: Any) -> Any:
        return config["text_config"]
