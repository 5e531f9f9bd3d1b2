"""Do sampled tokens follow the model? A tiny model, what it gives every token written out plainly, and the test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.assembly.assemble import assemble
from engine.contracts.events import StepEvent
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.core import EngineCore
from engine.startup.build import build_engine

from ..kernels import tiny
from .drafted import COMMON, assert_idle

VOCAB, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 2, 4, 2, 16
FEWEST = 10.0
"""Cells that expect fewer tokens are taken together."""


def write_models(folder: Path) -> tuple[Path, Path]:
    """The target, and a draft model that knows it well but not perfectly: its first layer alone."""
    generator = torch.Generator().manual_seed(5)
    tensors = tiny.weights(3)
    tensors = {name: tensor for name, tensor in tensors.items() if "layers.2" not in name}
    tensors["model.embed_tokens.weight"] = 0.4 * torch.randn(VOCAB, 64, generator=generator)
    tensors["lm_head.weight"] = 0.25 * torch.randn(VOCAB, 64, generator=generator)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.1.{name}.weight"] *= 0.4  # what comes after the first layer changes little
    first = {name: tensor for name, tensor in tensors.items() if "layers.1" not in name}
    paths = folder / "target", folder / "draft"
    for path, weights, layers in zip(paths, (tensors, first), (LAYERS, 1), strict=True):
        path.mkdir()
        tiny.write(path, weights, vocab_size=VOCAB, num_hidden_layers=layers)
    return paths


def engine(model: Path, overrides: Sequence[str]) -> EngineCore:
    """An engine that always drafts as far as it can."""
    common = (f"model.path={model}", *COMMON, "scheduler=continuous", "scheduler.max_requests=64")
    return build_engine(assemble([*common, "drafter.adaptive=false", *overrides])).core


@dataclass(frozen=True, slots=True)
class Sample:
    """What a run of the engine came to."""

    outputs: tuple[tuple[EngineRequest, tuple[int, ...]], ...]
    accepted: int
    rejected: int
    """Drafts that were, although all before them were accepted; a token of the target's replaced each."""


def sample(core: EngineCore, requests: Sequence[EngineRequest], batch: int) -> Sample:
    """Run all, ``batch`` at once."""
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    waiting, running, tried, accepted = list(reversed(requests)), 0, 0, 0
    while waiting or core.has_work:
        while waiting and running < batch:
            core.submit(waiting.pop())
            running += 1
        done = core.step()
        for out in done.outputs:
            assert out.finish_reason != "error", out.error
            outputs[out.request_id].extend(out.tokens)
            running -= out.finish_reason is not None
        for event in done.events:
            if isinstance(event, StepEvent):
                tried, accepted = tried + sum(event.drafts_tried), accepted + sum(event.drafts_accepted)
    assert_idle(core)
    found = tuple((request, tuple(outputs[request.request_id])) for request in requests)
    return Sample(found, accepted, tried - accepted)


# What the model gives every token -----------------------------------------------------------------------------------


def logits(model: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """``[N, T]`` -> float32 ``[N, T, VOCAB]``: a Llama without a cache."""
    rows, length = tokens.shape
    half = torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
    angles = (torch.arange(length)[:, None] * 10000.0**-half).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    def split(x: Tensor, heads: int) -> Tensor:
        return x.view(rows, length, heads, HEAD_DIM).transpose(1, 2)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), model[f"{name}.weight"], 1e-5)

    x = model["model.embed_tokens.weight"][tokens]
    for i in range(sum(name.endswith("q_proj.weight") for name in model)):
        name = f"model.layers.{i}"
        attention = {p: model[f"{name}.self_attn.{p}_proj.weight"] for p in "qkvo"}
        h = norm(x, f"{name}.input_layernorm")
        q, k = rotate(split(h @ attention["q"].T, HEADS)), rotate(split(h @ attention["k"].T, KV_HEADS))
        v = split(h @ attention["v"].T, KV_HEADS)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + seen.transpose(1, 2).reshape(rows, length, -1) @ attention["o"].T
        h = norm(x, f"{name}.post_attention_layernorm")
        gate, up, down = (model[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T
    return norm(x, "model.norm") @ model["lm_head.weight"].T


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """``[N, VOCAB]`` -> float64 probabilities after temperature, top-k and top-p."""
    probs = (logits.double() / params.temperature).softmax(dim=-1)
    ranked, order = probs.sort(dim=-1, descending=True)
    if params.top_k:
        ranked[:, params.top_k :] = 0.0
    before = ranked.cumsum(dim=-1) - ranked
    ranked[before >= params.top_p * ranked.sum(dim=-1, keepdim=True)] = 0.0
    ranked /= ranked.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(1, order, ranked)


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sampled tokens that may have been drafted: all but the first of each output."""

    before: np.ndarray
    """int64 ``[N]``: the token in front of each."""
    tokens: np.ndarray
    """int64 ``[N]``"""
    probs: np.ndarray
    """float64 ``[N, VOCAB]``: what the model gives every token after that text."""
    favoured: np.ndarray
    """bool ``[N, VOCAB]``: tokens that the draft model thinks likelier than that."""


def judged(model: dict[str, Tensor], draft: dict[str, Tensor], found: Sample) -> Tokens:
    """What both models give the tokens of a sample, each after its own text."""
    texts = [[*request.prompt, *output] for request, output in found.outputs]
    padded = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    before, tokens, probs, favoured = [], [], [], []
    given = (torch.cat([logits(weights, part) for part in torch.split(padded, 256)]) for weights in (model, draft))
    for (request, _), row, text, ours, theirs in zip(found.outputs, padded, texts, *given, strict=True):
        first, end = len(request.prompt), len(text) - 1
        before.append(row[first:end])
        tokens.append(row[first + 1 : end + 1])
        probs.append(filtered(ours[first:end], request.sampling))
        favoured.append(theirs[first:end].softmax(dim=-1) > probs[-1])
    return Tokens(*(torch.cat(parts).numpy() for parts in (before, tokens, probs, favoured)))


# The test -----------------------------------------------------------------------------------------------------------


def p_value(found: Tokens) -> float:
    """Of the claim that every token was drawn from its row of ``probs``: three times the lowest p-value of three
    chi-square tests. They count how often the likeliest token came, the second likeliest and so on; which token
    followed which; and how often one came that the draft model favours, for what is wrong with verification is wrong
    in favour of drafts or against them."""
    tokens, probs = found.tokens, found.probs
    order = np.argsort(-probs, axis=1, kind="stable")
    by_rank = _statistic(np.argmax(order == tokens[:, None], axis=1), np.take_along_axis(probs, order, axis=1))
    followers = [_statistic(tokens[here], probs[here]) for here in (found.before == t for t in range(VOCAB))]
    by_follower = (sum(s for s, _ in followers), sum(f for _, f in followers))
    share = (probs * found.favoured).sum(axis=1)
    was_favoured = found.favoured[np.arange(len(tokens)), tokens]
    by_favour = _statistic(was_favoured.astype(np.int64), np.stack((1.0 - share, share), axis=1))
    return min(1.0, 3.0 * min(_tail(*test) for test in (by_rank, by_follower, by_favour)))


def _statistic(drawn: np.ndarray, probs: np.ndarray) -> tuple[float, int]:
    """Chi-square and its degrees of freedom: counts of ``drawn`` ``[N]`` against the sums of ``probs`` ``[N, C]``, by
    the covariance of counts whose draws are not all from one distribution (with one it is Pearson's)."""
    expected = probs.sum(axis=0)
    order = np.argsort(-expected, kind="stable")
    kept = int((expected[order] >= FEWEST).sum())
    if expected[order[kept:]].sum() < FEWEST:
        kept -= 1  # the last cell that is large enough takes what is left
    if kept < 1:
        return 0.0, 0
    cells = order[:kept]  # the rest is one more cell, which the others determine
    counts = np.bincount(drawn, minlength=probs.shape[1])[cells]
    here = probs[:, cells]
    covariance = np.diag(expected[cells]) - here.T @ here
    off = counts - expected[cells]
    return float(off @ np.linalg.solve(covariance, off)), kept


def _tail(statistic: float, freedom: int) -> float:
    halves = (torch.tensor(value / 2, dtype=torch.float64) for value in (freedom, statistic))
    return float(torch.special.gammaincc(*halves))
