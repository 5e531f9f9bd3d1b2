"""Law 1 for sampling: whatever drafts, the tokens that leave the engine are drawn from the model's own distribution.

More than 100,000 tokens a case, from the whole loop: requests of different lengths come and go, share prefixes and are
verified together, with width 4. What the model gives each token is computed without the engine. The same test finds
verification that is off by a total variation of 0.02.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from engine.execution.philox import ACCEPT, SAMPLE, uniform
from engine.execution.positions import Position
from engine.execution.sampling import draw_from_weights, target_probs
from safetensors.torch import load_file
from torch import Tensor

from engine.contracts.request import EngineRequest, SamplingParams
from engine.execution import verify

from . import sampled
from .drafted import replace_params
from .sampled import Sample, Tokens, judged, p_value, sample

NUM_TOKENS, BATCH, BIAS, BORDER = 100_000, 64, 0.02, 1e-3
PARAMS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    "top-k 20": SamplingParams(temperature=1.0, top_k=20),
}
DRAFTERS = {
    "sampling_model": ("drafter=draft_model", "drafter.path={draft}"),
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
    """Verification that moves probability from the likeliest token to the second, wherever it asks for the target's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._moved, self._asked = 0.0, 0
        monkeypatch.setattr(verify, "target_probs", self._target_probs)
        monkeypatch.setattr(verify, "choose", self._choose)

    @property
    def total_variation(self) -> float:
        """Between the target's distribution and what was drawn from, on the average of all that was."""
        return self._moved / self._asked

    def _target_probs(self, logits: Tensor, positions: Sequence[Position]) -> Tensor:
        right = target_probs(logits, positions)
        probs, order = right.sort(dim=-1, descending=True)
        moved = torch.where(probs[:, 1] > 0, BIAS, 0.0)[:, None]
        wrong = right.scatter_add(1, order[:, :1], -moved).scatter_add(1, order[:, 1:2], moved)
        self._moved += float(0.5 * (wrong - right).abs().sum())
        self._asked += len(right)
        return wrong

    def _choose(self, logits: Tensor, positions: Sequence[Position]) -> Tensor:
        return draw_from_weights(self._target_probs(logits, positions), positions, SAMPLE)


class Leniency:
    """Rejection sampling that lets drafts stand more often than it should: its coin falls short by :data:`SHORT`."""

    SHORT = 0.06

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._off, self._drawn = 0.0, 0
        self._replace = verify._replace
        monkeypatch.setattr(verify, "uniform", self._uniform)
        monkeypatch.setattr(verify, "_replace", self._measured)

    @property
    def total_variation(self) -> float:
        """Between the target's distribution and what is drawn from, averaged over all positions that get a token."""
        return self._off / self._drawn

    def _uniform(self, seeds: Tensor, positions: Tensor, purpose: int, n: int) -> Tensor:
        return uniform(seeds, positions, purpose, n) * (1.0 - self.SHORT * (purpose == ACCEPT))

    def _measured(self, p: Tensor, q: Tensor, positions: Sequence[Position], ends: Sequence[int]) -> list[int]:
        stands = torch.where(q > 0, p / ((1.0 - self.SHORT) * q), 0.0).clamp(max=1.0) * q
        residual = (p - q).clamp(min=0.0)
        drawn = stands + (1.0 - stands.sum(-1, keepdim=True)) * residual / residual.sum(-1, keepdim=True)
        off = 0.5 * (drawn - p).abs().sum(-1)
        behind_all = (q.sum(-1) == 0).nonzero()[:, 0].tolist()  # positions behind a chain, where nothing is proposed
        for start, end in zip([0, *(at + 1 for at in behind_all[:-1])], ends, strict=True):
            self._off += float(off[start : end + 1].sum())
            self._drawn += end + 1 - start
        return self._replace(p, q, positions, ends)


Case = tuple[str, Sequence[SamplingParams], Sequence[bool]]
"""A drafter, how is sampled, and whether requests have a seed: all combinations of the latter, in turn."""
MIXED: Case = ("sampling_model", tuple(PARAMS.values()), (False, False, True))


def drafted(paths: Paths, case: Case, num_tokens: int, bias: Callable[[], object] = lambda: None) -> Tokens:
    """At least ``num_tokens`` tokens of an engine, and what the model gives them. Drafts stood and fell, both often.
    ``bias`` is called when the engine is ready."""
    target, draft = paths
    drafter, params, seeded = case
    overrides = [part.format(draft=draft) for part in DRAFTERS[drafter]]
    core = sampled.engine(target, [*overrides, "drafter.max_width=4"], samples_drafts=drafter == "sampling_model")
    bias()
    found: Sample = sample(core, requests(params, seeded, num_tokens), BATCH)
    core.close()
    weights = [load_file(path / "model.safetensors") for path in (target, draft)]
    tokens = judged(weights[0], weights[1], found)
    print(f"{drafter}: {len(tokens.tokens)} tokens, {found.accepted} drafts accepted, {found.rejected} rejected")
    assert len(tokens.tokens) >= num_tokens
    assert min(found.accepted, found.rejected) > num_tokens / 20
    return tokens


def check(paths: Paths, case: Case) -> None:
    p = p_value(drafted(paths, case, NUM_TOKENS))
    print(f"p = {p:.3g}")
    assert p > BORDER


def check_biased(
    paths: Paths, case: Case, num_tokens: int, monkeypatch: pytest.MonkeyPatch, plant: type[Bias | Leniency] = Bias
) -> None:
    planted: list[Bias | Leniency] = []
    p = p_value(drafted(paths, case, num_tokens, lambda: planted.append(plant(monkeypatch))))
    print(f"p = {p:.3g}, total variation {planted[0].total_variation:.4f}")
    assert 0.7 * BIAS < planted[0].total_variation < 1.01 * BIAS
    assert p < BORDER


def test_with_rejected_drafts_and_shared_noise_in_one_batch_tokens_follow_the_model(paths: Paths) -> None:
    check(paths, MIXED)


def test_a_third_of_the_tokens_already_shows_a_bias_of_two_percent(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_biased(paths, MIXED, NUM_TOKENS // 3, monkeypatch)


def test_a_fifth_shows_drafts_that_stand_a_little_too_often(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    case: Case = ("sampling_model", tuple(PARAMS.values()), (False,))
    check_biased(paths, case, NUM_TOKENS // 5, monkeypatch, Leniency)


@pytest.mark.slow
@pytest.mark.parametrize("seeded", [False, True], ids=["unseeded", "seeded"])
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_follow_the_model_whatever_drafts(paths: Paths, drafter: str, name: str, seeded: bool) -> None:
    check(paths, (drafter, (PARAMS[name],), (seeded,)))


@pytest.mark.slow
@pytest.mark.parametrize("seeded", [False, True], ids=["unseeded", "seeded"])
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("drafter", ["sampling_model", "draft_model"])
def test_a_bias_of_two_percent_shows_whichever_way_drafts_are_judged(
    paths: Paths, drafter: str, name: str, seeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_biased(paths, (drafter, (PARAMS[name],), (seeded,)), NUM_TOKENS, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMS)
def test_drafts_that_stand_a_little_too_often_show(paths: Paths, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_biased(paths, ("sampling_model", (PARAMS[name],), (False,)), NUM_TOKENS, monkeypatch, Leniency)


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
