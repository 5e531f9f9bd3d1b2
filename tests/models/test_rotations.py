"""What rotations mean for the lengths of texts is said before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.assembly.assemble import assemble
from engine.assembly.errors import AssemblyError
from engine.models.rotations import rotation_notes
from tests.families import model_graph
from tests.kernels import tiny

FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
WHY = "keys in the cache stay as they are"


def folder(path: Path, **rope: Any) -> str:
    config = tiny.CONFIG | {"head_dim": 16, "rope_parameters": {"rope_theta": 1e4, **rope}}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_lengths_beyond_those_of_a_dynamic_rotation_are_refused_with_the_reason(tmp_path: Path) -> None:
    """transformers computes all keys of a longer prompt by its length, and cached keys stay as they were."""
    path = folder(tmp_path, rope_type="dynamic", factor=4.0)
    assert assemble([f"model.path={path}", "device=cpu"]).max_len == 256
    said = rf"model.max_len=257: .* has 256 positions \(.*{WHY}\); use model.max_len=256"
    with pytest.raises(AssemblyError, match=said):
        assemble([f"model.path={path}", "device=cpu", "model.max_len=257"])
    (note,) = rotation_notes(model_graph(path), 256)
    assert note.startswith("texts have at most 256 tokens: with rope type 'dynamic'") and note.endswith(WHY)


def test_longrope_says_where_its_texts_are_rotated_unlike_those_of_transformers(tmp_path: Path) -> None:
    path = folder(tmp_path, rope_type="longrope", original_max_position_embeddings=64, **FACTORS)
    assert rotation_notes(model_graph(path), 64) == ()
    (note,) = rotation_notes(model_graph(path), 65)
    assert "'longrope': every text is rotated by the factors for more than 64 tokens, as model.max_len=65" in note
    assert note.endswith("If none is longer, set model.max_len=64")


def test_other_rotations_need_no_word(tmp_path: Path) -> None:
    assert rotation_notes(model_graph(folder(tmp_path, rope_type="linear", factor=2.0)), 512) == ()
