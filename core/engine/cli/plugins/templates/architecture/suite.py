from dataclasses import replace

from engine.cli.plugins.templates.architecture.plugin import (
    FAMILIES,
    MineArchitecture,
    MineArchitectureConfig,
    only_this_family,
)
from engine.contracts.architecture import Architecture
from engine.testing.context import build_context


def make() -> MineArchitecture:
    return MineArchitecture(MineArchitectureConfig(), build_context())


def test_it_fulfils_the_contract() -> None:
    assert isinstance(make(), Architecture)


def test_every_layer_is_described_once_and_under_its_own_names() -> None:
    model = replace(build_context().model, num_layers=3, layer_windows=(None, 8, None))
    ops = make().describe(model)
    assert len(ops.layers) == 3
    assert (ops.embed.vocab_size, ops.head.tied) == (model.vocab_size, model.tie_embeddings)
    assert all(f"model.layers.{index}." in str(layer) for index, layer in enumerate(ops.layers))
    assert make().describe(model) == ops, "the same model is described alike every time"


def test_checkpoints_of_other_families_are_refused_with_the_reason() -> None:
    context = build_context()
    for family in FAMILIES:
        assert only_this_family(replace(context.model, architecture=family), context.device) == ()
    (reason,) = only_this_family(replace(context.model, architecture="OtherForCausalLM"), context.device)
    assert "OtherForCausalLM" in reason
