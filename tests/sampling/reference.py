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


def _philox(counter, key):
    """Philox4x32-10 on Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, p0 >> 32 ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def gumbel_noise(seed, output_index, vocab):
    """What is added to the scaled logits of an output position: a function of seed and position alone."""
    key = (seed & 0xFFFFFFFF, seed >> 32)
    words = [word for block in range(-(-vocab // 4)) for word in _philox((block, 0, output_index, 0), key)][:vocab]
    unit = (np.array(words, dtype=np.float64) + 0.5) / 2**32
    return -np.log(-np.log1p(-unit))


def next_token(logits, params, seed, history, prompt_len, stop_ids):
    """The token after a text."""
    output_index = len(history) - prompt_len
    x = adjusted(logits, params, history, prompt_len, output_index, stop_ids)
    if params.temperature == 0.0:
        return int(x.argmax())
    with np.errstate(divide="ignore"):
        return int((np.log(distribution(x, params)) + gumbel_noise(seed, output_index, len(x))).argmax())
