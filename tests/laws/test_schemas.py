"""Laws of outputs that follow a JSON schema, over schemas drawn at random: what has ended validates, and is the same
whatever drafts, overlaps or shares out. Weights of the bundled model's shape are noise: any token may come that may.
In float32, near ties are rare; of noise in bfloat16 the drafts that a step verifies decide some."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM
from engine.assembly.model_config import bundled_dir
from engine.contracts.constraint import Grammar
from engine.contracts.request import EngineRequest, SamplingParams
from tests.selection import few

from .schemas import Draw

A_FEW, ALL = range(0, 300, 50), range(300)
SETS = {
    "plain": (),
    "no overlap": ("overlap=false",),
    "ngram": ("drafter=ngram", "drafter.adaptive=false", "drafter.min_match=1"),
    "early_exit": ("drafter=early_exit", "drafter.adaptive=false", "drafter.layers=2"),
    "draft_model": ("drafter=draft_model", "drafter.adaptive=false"),
    "eagle3": ("drafter=eagle3", "drafter.adaptive=false", "drafter.max_width=3"),
    "tp=2": ("parallelism=threads", "communicator=simulated", "parallelism.tp=2"),
}
EXACT = frozenset(SETS) - {"tp=2"}
"""Several ranks add in another order: a near tie may fall otherwise."""
COMMON = (
    "device=cpu",
    "threads=1",
    "model.dtype=float32",
    "model.max_len=512",
    "exporter=[]",
    "scheduler.max_requests=8",
    "seed=3",
)
Outputs = list[tuple[str, str]]
"""The end and the text of each."""


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with other weights: each tensor of its own mean and deviation."""
    folder = tmp_path_factory.mktemp("noise") / "model"
    shutil.copytree(bundled_dir(), folder)
    draw = torch.Generator().manual_seed(5)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        drawn = torch.randn(weight.shape, generator=draw) * weight.float().std() + weight.float().mean()
        weights[name] = drawn.to(weight.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def asked(folder: Path, overrides: Sequence[str], numbers: Sequence[int]) -> Outputs:
    """One output for each schema, every other one sampled."""
    llm = LLM(str(folder), [*COMMON, *overrides])
    prompt = tuple(llm.tokenizer.encode_now("The answer as JSON: "))
    tokens: dict[str, list[int]] = {str(number): [] for number in numbers}
    ends: dict[str, str] = {}
    for number in numbers:
        grammar = Grammar("json_schema", json.dumps(Draw(number).schema()))
        temperature = 1.0 if number % 2 else 0.0
        sampling = SamplingParams(max_tokens=300, temperature=temperature, seed=number, grammar=grammar)
        llm.core.submit(EngineRequest(str(number), prompt, sampling))
    while llm.core.has_work:
        for out in llm.core.step().outputs:
            assert not out.error, f"schema {out.request_id}: {out.error}"
            tokens[out.request_id] += out.tokens
            if out.finish_reason is not None:
                ends[out.request_id] = out.finish_reason
    llm.core.check_idle()
    texts = [llm.tokenizer.decode_now(tokens[str(number)], skip_special_tokens=True) for number in numbers]
    llm.close()
    return [(ends[str(number)], text) for number, text in zip(numbers, texts, strict=True)]


@pytest.fixture(scope="module")
def plain(noise: Path) -> Outputs:
    return asked(noise, (), ALL)


def assert_of_schemas(found: Outputs, numbers: Sequence[int]) -> None:
    """Those that have ended; the others were as long as they may be."""
    kind, ended = jsonschema.Draft202012Validator, 0
    for number, (end, text) in zip(numbers, found, strict=True):
        if end == "stop":
            jsonschema.validate(json.loads(text), Draw(number).schema(), kind, format_checker=kind.FORMAT_CHECKER)
            ended += 1
    assert ended > 0.7 * len(numbers)


@few(1)
@pytest.mark.parametrize("name", SETS)
def test_outputs_that_have_ended_are_of_their_schema_whoever_drafts(name: str, noise: Path) -> None:
    found = asked(noise, SETS[name], A_FEW)
    assert_of_schemas(found, A_FEW)
    if name in EXACT:
        assert found == asked(noise, (), A_FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_300_schemas(name: str, noise: Path, plain: Outputs) -> None:
    found = asked(noise, SETS[name], ALL)
    assert_of_schemas(found, ALL)
    if name in EXACT:
        assert found == plain
