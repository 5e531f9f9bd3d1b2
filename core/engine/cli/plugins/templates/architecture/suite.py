from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from engine.cli.plugins.templates.architecture.plugin import (
    FAMILIES,
    MineArchitecture,
    MineArchitectureConfig,
    only_this_family,
)
from engine.contracts.graph import Builder
from engine.testing.architecture import ArchitectureConformance
from engine.testing.context import build_context

PLAIN = {
    "architectures": ["MineForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class TestMineArchitecture(ArchitectureConformance):
    def make(self) -> MineArchitecture:
        return MineArchitecture(MineArchitectureConfig())

    def models(self) -> Mapping[str, Mapping[str, Any]]:
        """Small ones, one for each thing in which models of the family differ. Where transformers has the family,
        define ``reference(self, model)`` as well: logits are then compared with those of that model."""
        types = ["full_attention", "sliding_attention", "full_attention"]
        return {
            "plain": PLAIN,
            "tied": PLAIN | {"tie_word_embeddings": True},
            "windows": PLAIN | {"sliding_window": 8, "layer_types": types},
        }


@pytest.mark.parametrize("odd", [{"hidden_act": "relu"}, {"mlp_bias": True}])
def test_what_the_plugin_does_not_compute_is_refused_with_the_key(odd: dict[str, Any]) -> None:
    model = replace(build_context().model, raw=PLAIN | odd)
    with pytest.raises(ValueError, match=next(iter(odd))):
        MineArchitecture(MineArchitectureConfig()).describe(model, Builder())


def test_checkpoints_of_other_families_are_refused_with_the_reason() -> None:
    context = build_context()
    for family in FAMILIES:
        assert only_this_family(replace(context.model, architecture=family), context.device) == ()
    (reason,) = only_this_family(replace(context.model, architecture="OtherForCausalLM"), context.device)
    assert "OtherForCausalLM" in reason
