"""A plain float64 sampler to compare with: one position at a time, lists and loops, no shared code."""

from __future__ import annotations

import math

import numpy as np


def adjusted(logits, params, history, prompt_len, output_index, stop_ids):
    """Logits after bias, penalties and minimum length."""
    x = np.array(logits, dtype=np.float64)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    output = list(history[prompt_len:])
    for token in set(history):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if output_index < params.min_tokens:
        x[list(stop_ids)] = -math.inf
    return x


def distribution(x, params):
    """Probabilities after temperature, top-k, top-p and min-p (the last relative to the most likely token)."""
    z = np.exp((x - x.max()) / params.temperature)
    kept = np.ones(len(z), dtype=bool)
    order = sorted(range(len(z)), key=lambda t: -z[t])
    if params.top_k:
        kept[order[params.top_k :]] = False
    z = np.where(kept, z, 0.0)
    if params.top_p < 1.0:
        mass, total = 0.0, z.sum()
        for rank, token in enumerate(order):
            if rank and mass >= params.top_p * total:
                kept[token] = False
            mass += z[token]
    kept &= z >= params.min_p * z.max()
    z = np.where(kept, z, 0.0)
    return z / z.sum()


def chi_square(counts, probs):
    """Pearson's statistic; categories of probability 0 must be empty."""
    counts, probs = np.asarray(counts, dtype=float), np.asarray(probs, dtype=float)
    assert counts[probs == 0].sum() == 0, "a token of probability 0 was drawn"
    expected = probs * counts.sum()
    used = probs > 0
    return float((((counts - expected) ** 2)[used] / expected[used]).sum())
