"""From a server that counts experts to one that places them by load: what a user does, with a random model."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.make_random_model import parser, write_model

from engine import LLM
from tests.needs import needs_compiler
from tests.ranks.processes import Server
from tests.ranks.test_tokens import assert_same_but_for_ties

SIZES = "--layers 2 --hidden 64 --heads 4 --kv-heads 2 --experts 8 --top-k 2 --ffn 32 --vocab 512 --dtype float32"
COMMON = ("device=cpu", "threads=1", "exporter=[]", "model.max_len=256", "scheduler.max_requests=4", "seed=3")
COUNTING = "parallelism.count_experts=true"
SPREAD = ("parallelism=threads", "communicator=simulated", "parallelism.tp=2", "parallelism.ep=2")
PROMPTS = ([5, 6, 7, 8, 9] * 4, [9, 8, 7], [300] * 30)
NUM_TOKENS = 9
COMPUTED = sum(map(len, PROMPTS)) + len(PROMPTS) * (NUM_TOKENS - 1)
"""Tokens: the last one of each text is only sampled."""
ALONE = ("overlap=false", "scheduler=continuous", "kv_allocator=paged", "drafter=none")
"""No token is computed twice, in vain or not at all."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("mixture")
    write_model(path, parser().parse_args([str(path), *SIZES.split()]))
    yield str(path)


def said(folder: str, *overrides: str) -> tuple[list[Any], dict[int, tuple[int, ...]], tuple[str, ...]]:
    """Texts, loads and notes."""
    llm = LLM(folder, overrides=[*COMMON, *overrides])
    try:
        assert not any(map(sum, llm.expert_load().values())), "start-up is not counted"
        texts = llm.generate(PROMPTS, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, logprobs=2)
        return texts, llm.expert_load(), llm.info.notes
    finally:
        llm.close()


@pytest.mark.parametrize("execution", ["eager", pytest.param("compile", marks=needs_compiler)])
def test_every_computed_token_is_counted_once_in_every_layer(folder: str, execution: str) -> None:
    texts, load, notes = said(folder, *ALONE, COUNTING, f"execution={execution}")
    assert {layer: sum(counts) for layer, counts in load.items()} == {0: 2 * COMPUTED, 1: 2 * COMPUTED}
    assert not any("uncaptured" in note for note in notes)
    plain, none, _ = said(folder, *ALONE, f"execution={execution}")
    assert [text.tokens for text in plain] == [text.tokens for text in texts] and none == {}


def test_ranks_count_what_one_counts(folder: str) -> None:
    _, load, _ = said(folder, *ALONE, COUNTING, "execution=eager")
    _, found, _ = said(folder, *ALONE, COUNTING, *SPREAD, "execution=eager")
    assert found == load


@pytest.mark.slow
def test_what_a_server_counted_is_how_the_next_one_places(folder: str, tmp_path: Path) -> None:
    server = Server(tmp_path / "log", f"model.path={folder}", "model.name=bundled", *COMMON[2:], COUNTING)
    try:
        server.wait_until_ready(120)
        assert server.stream(20).result()[-1] == "[DONE]"
        with urllib.request.urlopen(f"{server.url}/engine/expert_load", timeout=30) as response:
            answer = response.read()
    finally:
        server.kill()
    file = tmp_path / "load.json"
    file.write_bytes(answer)
    layers = json.loads(answer)["layers"]
    assert set(layers) == {"0", "1"} and all(len(counts) == 8 and sum(counts) >= 40 for counts in layers.values())

    placed = (*SPREAD, f"parallelism.expert_load={file}")
    check = subprocess.run(
        [sys.executable, "-m", "engine.cli.main", "check", f"model.path={folder}", *COMMON, *placed],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "experts placed by load: of 2 shares the busiest is expected to be chosen 1." in check.stdout

    alone, _, _ = said(folder)
    together, _, _ = said(folder, *placed)
    for mine, reference in zip(together, alone, strict=True):
        assert_same_but_for_ties(mine, reference)
