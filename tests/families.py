"""Facts and graphs of checkpoints, by the built-in architectures."""

from engine.assembly.model_config import model_config
from engine.contracts.config import SlotConfig
from engine.contracts.graph import Graph
from engine.contracts.model import ModelFacts
from engine.models.record import facts, recorded
from engine_plugins.architecture.llama import LlamaArchitecture

LLAMA = LlamaArchitecture(SlotConfig())


def model_facts(path: str) -> ModelFacts:
    """Of a Llama-like checkpoint."""
    return facts(LLAMA, model_config(path))


def model_graph(path: str) -> Graph:
    """Of a Llama-like checkpoint."""
    return recorded(LLAMA, model_config(path))
