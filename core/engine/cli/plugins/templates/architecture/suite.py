from collections.abc import Mapping
from dataclasses import replace

from engine.cli.plugins.templates.architecture.plugin import (
    FAMILIES,
    MineArchitecture,
    MineArchitectureConfig,
    only_this_family,
)
from engine.contracts.model import ModelFacts
from engine.testing.architecture import ArchitectureConformance
from engine.testing.context import build_context


class TestMineArchitecture(ArchitectureConformance):
    def make(self) -> MineArchitecture:
        return MineArchitecture(MineArchitectureConfig(), build_context())

    def models(self) -> Mapping[str, ModelFacts]:
        """Small ones, one for each thing in which models of the family differ."""
        plain = replace(build_context().model, num_layers=3, layer_windows=(None,) * 3, tie_embeddings=False)
        return {
            "plain": plain,
            "tied": replace(plain, tie_embeddings=True),
            "windows": replace(plain, layer_windows=(None, 8, None)),
        }


def test_checkpoints_of_other_families_are_refused_with_the_reason() -> None:
    context = build_context()
    for family in FAMILIES:
        assert only_this_family(replace(context.model, architecture=family), context.device) == ()
    (reason,) = only_this_family(replace(context.model, architecture="OtherForCausalLM"), context.device)
    assert "OtherForCausalLM" in reason
