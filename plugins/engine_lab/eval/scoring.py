"""How far one plan's predictions are from the reference's: perplexity, KL divergence, first choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_lab.eval.forward import LoadedPlan
from engine_lab.eval.windows import Window
from engine_lab.shared.errors import EvalFailed


class BrokenLogits(EvalFailed):
    """A plan computed something that is not a number."""


@dataclass(slots=True)
class Score:
    """Sums over scored tokens, in float64."""

    tokens: int = 0
    nll: float = 0.0
    """Negative log-likelihood of the text, nats."""
    kl: float = 0.0
    """``KL(reference || plan)``, nats."""
    agreed: int = 0
    """Tokens at which both have the same first choice."""

    @property
    def perplexity(self) -> float:
        """Infinite where it is beyond what a float holds."""
        try:
            return math.exp(self.nll / self.tokens)
        except OverflowError:
            return math.inf

    @property
    def mean_kl(self) -> float:
        return self.kl / self.tokens

    @property
    def agreement(self) -> float:
        return self.agreed / self.tokens


def score_windows(
    reference: LoadedPlan,
    plans: Sequence[LoadedPlan],
    windows: Sequence[Window],
    on_window: Callable[[], None] = lambda: None,
) -> tuple[Score, list[Score]]:
    """The reference's score and each plan's; the reference is computed once per window.

    Raises :class:`BrokenLogits`.
    """
    own, scores = Score(), [Score() for _ in plans]
    for window in windows:
        _score(window, reference, plans, own, scores)
        on_window()
    return own, scores


@torch.inference_mode()
def _score(
    window: Window, reference: LoadedPlan, plans: Sequence[LoadedPlan], own: Score, scores: Sequence[Score]
) -> None:
    rows = slice(window.first - 1, len(window.tokens) - 1)  # row i predicts token i + 1
    expected = reference.hidden(window.tokens)[rows]
    found = [plan.hidden(window.tokens)[rows] for plan in plans]
    targets = torch.tensor(window.tokens[window.first :], device=expected.device)
    streams = [plan.logits(hidden) for plan, hidden in zip(plans, found, strict=True)]
    start = 0
    for logits in reference.logits(expected):
        wanted = targets[start : start + len(logits)]
        start += len(logits)
        logp = log_probabilities(logits, reference.label)
        add(own, logp, logp, wanted)
        for plan, stream, score in zip(plans, streams, scores, strict=True):
            add(score, logp, log_probabilities(next(stream), plan.label), wanted)


def log_probabilities(logits: Tensor, whose: str = "the plan") -> Tensor:
    """``[rows, vocab]`` float32. Raises :class:`BrokenLogits`, which says ``whose``."""
    logp = logits.float().log_softmax(dim=-1)
    if not bool(torch.isfinite(logp.amax(dim=-1)).all()):
        raise BrokenLogits(f"{whose} computed logits that are not numbers; try another dtype, as model.dtype=float32")
    return logp


def add(score: Score, reference: Tensor, logp: Tensor, targets: Tensor) -> None:
    """``reference``, ``logp``: log-probabilities ``[rows, vocab]``; ``targets``: the text's tokens ``[rows]``."""
    score.tokens += len(targets)
    score.nll -= float(logp.gather(1, targets[:, None]).sum(dtype=torch.float64))
    if logp is reference:
        score.agreed += len(targets)
        return
    # A token that the reference rules out (probability 0) adds nothing, whatever the plan says about it.
    # That holds too where the probability is too small for float32: 0 * inf would not be a number.
    p = reference.exp()
    terms = torch.where(p > 0.0, p * (reference - logp), 0.0)
    score.kl += float(terms.sum(dtype=torch.float64))
    score.agreed += int((reference.argmax(dim=-1) == logp.argmax(dim=-1)).sum())
