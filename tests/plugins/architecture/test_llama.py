"""The llama architecture describes what transformers computes; it refuses what it does not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from engine.assembly.model_config import read_config
from engine.contracts.config import SlotConfig
from engine.contracts.model import ModelConfig
from engine.contracts.ops import Attention, Linear, Norm
from engine.models.record import recorded
from engine.testing.architecture import ArchitectureConformance
from engine_plugins.architecture.llama import LlamaArchitecture

T = TypeVar("T")
ARCHITECTURE = LlamaArchitecture(SlotConfig())

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-3, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MISTRAL = SHAPE | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
QWEN2 = SHAPE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = SHAPE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}


class TestLlama(ArchitectureConformance):
    """What the engine computes in steps is compared for :attr:`in_steps`: the others' layers read and write caches as
    these do."""

    in_steps = ("llama", "mistral", "qwen3")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "model_name" in metafunc.fixturenames:
            quick = self.in_steps if metafunc.function.__name__ in IN_STEPS else tuple(self.models())
            names = [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in self.models()]
            metafunc.parametrize("model_name", names)

    def make(self) -> LlamaArchitecture:
        return LlamaArchitecture(SlotConfig())

    def models(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            "llama": LLAMA,
            "llama with biases": LLAMA | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
            "llama tied": LLAMA | {"tie_word_embeddings": True, "head_dim": 24, "num_key_value_heads": 1},
            "mistral": MISTRAL,
            "qwen2": QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "qwen3": QWEN3 | {"tie_word_embeddings": True},
        }

    def reference(self, model: ModelConfig) -> Any:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**model.raw), attn_implementation="eager")


IN_STEPS = {
    test.__name__
    for test in (
        ArchitectureConformance.test_neighbours_in_a_batch_do_not_change_a_row,
        ArchitectureConformance.test_a_cached_prefix_gives_the_logits_of_a_cold_start,
        ArchitectureConformance.test_rejected_drafts_change_nothing,
    )
}


def ops(kind: type[T], config: dict[str, Any], **changes: Any) -> list[T]:
    """Those of this kind, in order, of a model."""
    graph = recorded(ARCHITECTURE, read_config(config | changes, {}, "/nowhere", "model"))
    return [node.op for node in graph.nodes if isinstance(node.op, kind)]


def test_qwen2_has_qkv_biases_and_mistral_has_none() -> None:
    biased = [[part.bias for part in op.spec.parts] for op in ops(Linear, QWEN2, num_hidden_layers=1)]
    assert biased[0] == [True] * 3 and not any(map(any, biased[1:]))
    assert not any(part.bias for op in ops(Linear, MISTRAL) for part in op.spec.parts)


def test_only_qwen3_norms_its_heads() -> None:
    of_heads = [[op.size for op in ops(Norm, config)].count(8) for config in (LLAMA, MISTRAL, QWEN2)]
    assert of_heads == [0, 0, 0]
    assert [op.size for op in ops(Norm, QWEN3)].count(16) == 4


def test_each_layer_has_its_own_window() -> None:
    def windows(config: dict[str, Any], **changes: Any) -> list[int | None]:
        return [op.window for op in ops(Attention, config, **changes)]

    chosen = {"use_sliding_window": True, "sliding_window": 8}
    assert windows(QWEN2, **chosen, max_window_layers=1) == [None, 8]
    assert windows(QWEN2, **chosen, layer_types=["sliding_attention", "full_attention"]) == [8, None]
    assert windows(MISTRAL) == [8, 8] and windows(LLAMA, sliding_window=8) == [None, None]
    assert windows(QWEN2, sliding_window=8) == [None, None], "use_sliding_window says nothing of it"


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ValueError, match="hidden_act 'tanh' of the checkpoint: expected one of silu"):
        ops(Norm, LLAMA, hidden_act="tanh")
