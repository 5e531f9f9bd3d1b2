"""Law 1 for sampling: whatever drafts, the tokens that leave the engine are drawn from the model's own distribution.

More than 33,000 tokens, and on demand 100,000 a case, from the whole loop: requests of different lengths come and go,
share prefixes and are verified together, with 4 drafts a step. What the model gives each token is computed without the
engine. The same test, of as many tokens, finds verification that is off by a total variation of 0.02.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.contracts.request import EngineRequest, SamplingParams
from engine.sampling import verify
from engine.sampling.philox import SAMPLE, gumbel
from engine.sampling.state import SamplingBatch

from ..sampling.requests import target_probs
from . import sampled
from .drafted import replace_params
from .sampled import Sample, Tokens, judged, p_value, sample

NUM_TOKENS, FEWER_TOKENS, BATCH, BIAS, BORDER = 100_000, 33_000, 64, 0.02, 1e-3
PARAMS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    "top-k 20": SamplingParams(temperature=1.0, top_k=20),
}
DRAFTERS = {
    "draft_model": ("drafter=draft_model", "drafter.path={draft}"),
    "early_exit": ("drafter=early_exit", "drafter.layers=1"),
    "ngram": ("drafter=ngram", "drafter.min_match=1"),
    "suffix": ("drafter=suffix", "drafter.min_match=1", "drafter.min_confidence=0.1"),
}
Paths = tuple[Path, Path]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    return sampled.write_models(tmp_path_factory.mktemp("models"))


def requests(params: Sequence[SamplingParams], seeded: Sequence[bool], num_tokens: int) -> list[EngineRequest]:
    """Enough for so many tokens after the first ones; every combination in turn."""
    rng = np.random.default_rng(6)
    beginning = tuple(int(t) for t in rng.integers(0, sampled.VOCAB, 16))
    made: list[EngineRequest] = []
    tokens = 0
    while tokens < num_tokens:
        i, length, count = len(made), int(rng.integers(1, 12)), int(rng.integers(20, 61))
        prompt = tuple(int(t) for t in rng.integers(0, sampled.VOCAB, length))
        seed = i if seeded[i // len(params) % len(seeded)] else None
        sampling = replace_params(params[i % len(params)], max_tokens=count, ignore_eos=True, seed=seed)
        made.append(EngineRequest(f"r{i}", beginning + prompt if i % 4 == 0 else prompt, sampling))
        tokens += count - 1
    return made


class Bias:
    """Verification that moves probability from the likeliest token to the second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._moved, self._asked = 0.0, 0
        monkeypatch.setattr(verify, "choose", self._choose)

    @property
    def total_variation(self) -> float:
        """Between the target's distribution and what was drawn from, on the average of all that was."""
        return self._moved / self._asked

    def _choose(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        right = target_probs(logits, batch)
        probs, order = right.sort(dim=-1, descending=True)
        moved = torch.where(probs[:, 1] > 0, BIAS, 0.0)[:, None]
        wrong = right.scatter_add(1, order[:, :1], -moved).scatter_add(1, order[:, 1:2], moved)
        self._moved += float(0.5 * (wrong - right).abs().sum())
        self._asked += len(right)
        return (wrong.log() + gumbel(batch.seeds, batch.output_index, SAMPLE, wrong.shape[1])).argmax(dim=-1)


Case = tuple[str, Sequence[SamplingParams], Sequence[bool]]
"""A drafter, how is sampled, and whether requests have a seed: all combinations of the latter, in turn."""
MIXED: Case = ("draft_model", tuple(PARAMS.values()), (False, False, True))


def drafted(paths: Paths, case: Case, num_tokens: int, bias: Callable[[], object] = lambda: None) -> Tokens:
    """At least ``num_tokens`` tokens of an engine, and what the model gives them. Drafts were accepted and rejected,
    both often. ``bias`` is called when the engine is ready."""
    target, draft = paths
    drafter, params, seeded = case
    overrides = [part.format(draft=draft) for part in DRAFTERS[drafter]]
    core = sampled.engine(target, [*overrides, "drafter.max_width=4"])
    bias()
    found: Sample = sample(core, requests(params, seeded, num_tokens), BATCH)
    core.close()
    weights = [load_file(path / "model.safetensors") for path in (target, draft)]
    tokens = judged(weights[0], weights[1], found)
    print(f"{drafter}: {len(tokens.tokens)} tokens, {found.accepted} drafts accepted, {found.rejected} rejected")
    assert len(tokens.tokens) >= num_tokens
    assert min(found.accepted, found.rejected) > num_tokens / 20
    return tokens


def check(paths: Paths, case: Case, num_tokens: int) -> None:
    p = p_value(drafted(paths, case, num_tokens))
    print(f"p = {p:.3g}")
    assert p > BORDER


def check_biased(paths: Paths, case: Case, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planted: list[Bias] = []
    p = p_value(drafted(paths, case, num_tokens, lambda: planted.append(Bias(monkeypatch))))
    print(f"p = {p:.3g}, total variation {planted[0].total_variation:.4f}")
    assert 0.7 * BIAS < planted[0].total_variation < 1.01 * BIAS
    assert p < BORDER


def test_tokens_follow_the_model_after_drafts_drawn_with_the_noise_of_verification(paths: Paths) -> None:
    check(paths, MIXED, FEWER_TOKENS)


@pytest.mark.slow
def test_as_many_tokens_show_a_bias_of_two_percent(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    check_biased(paths, MIXED, FEWER_TOKENS, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seeded", [False, True], ids=["unseeded", "seeded"])
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_follow_the_model_whatever_drafts(paths: Paths, drafter: str, name: str, seeded: bool) -> None:
    check(paths, (drafter, (PARAMS[name],), (seeded,)), NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("drafter", ["draft_model", "ngram"])
def test_a_bias_of_two_percent_shows(paths: Paths, drafter: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_biased(paths, (drafter, (PARAMS[name],), (False, True)), NUM_TOKENS, monkeypatch)


@pytest.mark.slow
def test_the_test_is_fair_to_what_follows_the_model() -> None:
    """For tokens drawn by numpy its p-values lie below a tenth in about a tenth of all cases, and seldom near 0."""
    rng = np.random.default_rng(4)
    probs = rng.dirichlet(np.full(sampled.VOCAB, 0.2), size=6000)
    before = rng.integers(0, sampled.VOCAB, len(probs))
    favoured = rng.dirichlet(np.full(sampled.VOCAB, 0.2), size=len(probs)) > probs
    values = []
    for _ in range(200):
        drawn = (probs.cumsum(axis=1) > rng.random((len(probs), 1))).argmax(axis=1)
        values.append(p_value(Tokens(before, drawn, probs, favoured)))
    assert sum(value < 0.1 for value in values) <= 36
    assert sum(value > 0.5 for value in values) >= 70
    assert min(values) > 1e-4
