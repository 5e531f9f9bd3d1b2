"""Checkpoints that llm-compressor, GPTQModel, AutoAWQ and ModelOpt wrote: logits against those that transformers
computed from the weights which these libraries dequantized (``write_with_library.py --tiny`` makes them)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.kernels.paged_loop import PagedLoop, load
from tests.plugins.quantizer.checkpoint.reference import LARGEST, reader

WRITTEN = Path(__file__).with_name("written")
CASES = sorted(path.parent for path in WRITTEN.glob("*/*/model.safetensors"))


def test_every_library_is_here() -> None:
    assert {case.parent.name for case in CASES} == {
        "llmcompressor", "compressed-tensors", "gptqmodel", "autoawq", "modelopt",
    }  # fmt: skip
    assert len(CASES) == 12


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}:{case.name}")
def test_logits_are_those_of_what_the_library_wrote(
    case: Path, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = load_file(case / "logits.safetensors")
    facts, model = load(case, quantizer=reader(case))
    want = reference["logits"]
    found = PagedLoop(facts, model).logits(reference["tokens"].tolist())
    error = float((found - want).abs().max() / want.abs().max())
    record_property("largest_relative_error", error)
    versions = (case.parent / "versions.txt").read_text()
    with capsys.disabled():
        print(f"\n{versions:50s} {case.name:28s} largest relative error of logits {error:.1e}", end="")
    assert error <= LARGEST
