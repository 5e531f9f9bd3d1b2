"""Every built-in architecture refuses checkpoints that it cannot compute, before a tensor of them is read: it names the
key or the tensor, its value, and what was expected."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.plugins.architecture.family import FULL, SLIDING, described
from tests.selection import few
from tools.benchmarks.families import COMMON, suites

from engine.assembly.assemble import assemble
from engine.assembly.errors import AssemblyError
from engine.checkpoint.tensors import Checkpoint, CheckpointError, TensorEntry
from engine.contracts.graph import Graph
from engine.contracts.model import DeviceFacts
from engine.models.checkpoint_checks import check_names, check_shapes
from engine.startup.build import build_engine
from engine.testing.architecture import ArchitectureConformance, tensors_of
from engine.testing.plain import PlainQuantizer
from engine_plugins.architecture import config as registered
from engine_plugins.architecture import engine_architecture

HERE = Path(__file__)
FAMILIES: dict[str, tuple[ArchitectureConformance, str]] = {}
"""By first entry of ``architectures``: a suite, and the first model in it."""
for suite in suites([file for file in sorted(HERE.parent.glob("test_*.py")) if file != HERE]):
    for model_name in suite.models():
        FAMILIES.setdefault(suite.config(model_name).architecture, (suite, model_name))

of_every_family = pytest.mark.parametrize("family", FAMILIES)


def config(family: str) -> Mapping[str, Any]:
    suite, name = FAMILIES[family]
    return suite.config(name).raw


def text(family: str) -> Mapping[str, Any]:
    """The part of it for text."""
    whole = config(family)
    found: Mapping[str, Any] = whole.get("text_config") or whole
    return found


def graph(family: str, **changes: Any) -> Graph:
    """``changes``: of the part for text."""
    return described(type(FAMILIES[family][0].make()), config(family), **changes)


def test_every_architecture_that_is_registered_is_tried() -> None:
    names = {
        name
        for value in vars(registered).values()
        if isinstance(value, tuple)
        for name in value
        if name.endswith(("ForCausalLM", "ForConditionalGeneration"))
    }
    assert FAMILIES.keys() == names
    for family, (suite, name) in FAMILIES.items():
        made = f"{type(suite.make()).__module__}:{type(suite.make()).__qualname__}"
        computing = [
            provider.factory
            for provider in engine_architecture()
            if provider.unsupported is not None and not provider.unsupported(suite.config(name), DeviceFacts("cpu"))  # type: ignore[arg-type]
        ]
        assert computing == [made], family


# Tensors -------------------------------------------------------------------------------------------------------------


def stored(shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    """A checkpoint of which nothing but headers is there."""
    return Checkpoint({name: TensorEntry(Path("model"), torch.float32, shape, 0, 4) for name, shape in shapes.items()})


@few(15)
@of_every_family
def test_a_tensor_that_is_missing_or_has_another_shape_is_named(family: str) -> None:
    model, quantizer = graph(family), PlainQuantizer()
    shapes = dict(tensors_of(model))
    check_names(stored(shapes), model, quantizer, "m")
    check_shapes(stored(shapes), model, quantizer)
    kinds = {re.sub(r"\d+", "#", name): name for name in shapes}
    for name in kinds.values():
        less = {other: shape for other, shape in shapes.items() if other != name}
        with pytest.raises(CheckpointError, match=rf"model.path=m: .* missing from the checkpoint: {re.escape(name)}"):
            check_names(stored(less), model, quantizer, "m")
        found = (*shapes[name], 7)
        expected = f"tensor {name!r} has shape {list(found)}, the model expects {list(shapes[name])}"
        with pytest.raises(CheckpointError, match=re.escape(expected)):
            check_shapes(stored(shapes | {name: found}), model, quantizer)


@few(15)
@of_every_family
def test_tensors_that_transformers_ignores_are_not_read(family: str) -> None:
    """Layers that predict further tokens, of checkpoints as they are published, for example."""
    suite, name = FAMILIES[family]
    ignored = suite.reference(suite.config(name))._keys_to_ignore_on_load_unexpected
    model = graph(family)
    shapes = dict(tensors_of(model))
    for pattern in ignored:
        example = re.sub(r"\^|\\|\.\*", "", pattern) + ".of_it.weight"
        example = model.embedding.name.removesuffix("embed_tokens") * example.startswith("layers.") + example
        assert re.search(pattern, example), pattern
        check_names(stored(shapes | {example: (3,)}), model, PlainQuantizer(), "m")
    with pytest.raises(CheckpointError, match=r"does not use: model\.layers\.99\.of_it\.weight"):
        check_names(stored(shapes | {"model.layers.99.of_it.weight": (3,)}), model, PlainQuantizer(), "m")


# Configurations ------------------------------------------------------------------------------------------------------


@of_every_family
def test_an_unknown_rotation_is_refused(family: str) -> None:
    """Of all layers, or of those of a type, as the family has it."""
    rope, said = {"rope_type": "spiral", "rope_theta": 1e4}, []
    for given in (rope, {FULL: rope, SLIDING: rope}):
        with pytest.raises(ValueError) as raised:
            graph(family, rope_scaling=None, rope_parameters=given)
        said.append(str(raised.value))
    assert any("rope type 'spiral': expected one of default, " in each for each in said), said


@of_every_family
def test_an_unknown_type_of_layers_is_refused(family: str) -> None:
    with pytest.raises(ValueError, match=r"layer_types.*spiral.*expected"):
        graph(family, layer_types=["spiral"] * text(family)["num_hidden_layers"])


COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
ROTATE_IN_PART = ("Phi3", "Glm", "Gemma4", "Qwen3Next", "Qwen3_5")
"""How families begin that compute a share of a rotation."""


def wrong_values(family: str) -> dict[str, Any]:
    """Keys that every family reads, each with a value that none computes."""
    known = text(family)
    changes: dict[str, Any] = {
        "hidden_activation" if re.match("Gemma[234]", family) else "hidden_act": "tanh",
        "num_attention_heads": 0,
        "vocab_size": "many",
        "max_position_embeddings": 1,
    }
    if known is config(family):  # otherwise it is said beside the part for text
        changes["tie_word_embeddings"] = "perhaps"
    if not family.startswith(ROTATE_IN_PART):
        changes["partial_rotary_factor"] = 0.5
    if any(key in known for key in COUNTS):
        changes["num_experts_per_tok"] = 99
    return changes


@of_every_family
def test_values_that_no_model_has_are_refused_with_key_value_and_what_was_expected(family: str) -> None:
    for key, value in wrong_values(family).items():
        with pytest.raises(ValueError) as raised:
            graph(family, **{key: value})
        said = str(raised.value)
        shown = [str(value), repr(value)]
        assert key in said and any(each in said for each in shown) and "expected" in said, f"{key}={value!r}: {said}"


def saved(folder: Path, raw: Mapping[str, Any], **shapes: tuple[int, ...]) -> str:
    """A Llama checkpoint. ``shapes``: of tensors that have others than the model's; of none, they are missing."""
    (folder / "config.json").write_text(json.dumps(raw))
    wanted = dict(tensors_of(graph("LlamaForCausalLM"))) | shapes
    save_file({name: torch.zeros(shape) for name, shape in wanted.items() if shape}, folder / "model.safetensors")
    return f"model.path={folder}"


def test_start_up_refuses_before_it_reads_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Checkpoint, name: str) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Checkpoint, "read", read)
    raw = config("LlamaForCausalLM")
    path = saved(tmp_path, raw | {"rope_parameters": {"rope_type": "spiral"}})
    with pytest.raises(AssemblyError, match=r"rope type 'spiral': expected one of default"):
        assemble([*COMMON, path])
    norm = "model.layers.1.input_layernorm.weight"
    for shape, said in (
        ((), f"missing from the checkpoint: {norm}"),
        ((7,), r"has shape \[7\], the model expects \[32\]"),
    ):
        plan = assemble([*COMMON, saved(tmp_path, raw, **{norm: shape})])
        with pytest.raises(CheckpointError, match=said):
            build_engine(plan)
