"""Models, drafters and engines for the laws of drafting: tiny random models of every family, and the bundled one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.assembly.assemble import assemble
from engine.contracts.model import ModelFacts
from engine.contracts.request import EngineRequest, SamplingParams, Timings, TokenLogprobs
from engine.loop.core import EngineCore
from engine.service.tokenizer import Tokenizer
from engine.startup.build import build_engine
from tests.families import model_facts

from ..kernels import tiny
from .heads import write_eagle3, write_parallel_block

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
MODELS = (*FAMILIES, "bundled")
COMMON = (
    "device=cpu",
    "threads=1",
    "model.dtype=float32",
    "model.max_len=256",
    "exporter=[]",
    "kv_allocator.block_size=8",
)
NONE = ("drafter=none",)

DRAFTERS: dict[str, Callable[[Models, str], tuple[str, ...]]] = {
    "ngram": lambda models, name: ("drafter=ngram", "drafter.min_match=1"),
    "suffix": lambda models, name: ("drafter=suffix", "drafter.min_match=1", "drafter.min_confidence=0.1"),
    "early_exit": lambda models, name: ("drafter=early_exit", "drafter.layers=2"),
    "target": lambda models, name: ("drafter=draft_model", f"drafter.path={models.path(name)}"),
    "stranger": lambda models, name: ("drafter=draft_model", f"drafter.path={models.stranger(name)}"),
    "eagle3": lambda models, name: ("drafter=eagle3", f"drafter.path={models.head(name, write_eagle3)}"),
    "parallel_block": lambda models, name: (
        "drafter=parallel_block",
        f"drafter.path={models.head(name, write_parallel_block)}",
    ),
}
"""What selects a drafter for one of :data:`MODELS`. ``target``: a draft model that is the target and so never wrong;
``stranger``: one with random weights that is hardly ever right, and so are the heads."""


class Models:
    """Checkpoints, written when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str) -> Path:
        """One of :data:`MODELS`."""
        return Path(model_facts("bundled").path) if name == "bundled" else self._write(name, name, seed=1)

    def stranger(self, name: str) -> Path:
        """A random Llama with the vocabulary of a model."""
        vocab = model_facts("bundled").vocab_size if name == "bundled" else tiny.CONFIG["vocab_size"]
        return self._write(f"stranger-{vocab}", "Llama", seed=9, vocab_size=vocab)

    def head(self, name: str, write: Callable[[Path, ModelFacts], Path]) -> Path:
        """A random head for a model."""
        path = self._folder / f"{write.__name__}-{name}"
        return path if path.exists() else write(path, model_facts(str(self.path(name))))

    def _write(self, folder: str, family: str, seed: int, **options: Any) -> Path:
        path = self._folder / folder
        if not path.exists():
            path.mkdir()
            tensors = random_weights(family, seed, options.get("vocab_size", tiny.CONFIG["vocab_size"]))
            tiny.write(path, tensors, architectures=[f"{family}ForCausalLM"], **options)
        return path


def random_weights(family: str, seed: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Of a tiny model of a family, with everything random that the family has beside a Llama's weights."""
    generator = torch.Generator().manual_seed(100 + seed)
    tensors = tiny.weights(seed)
    for i in range(tiny.CONFIG["num_hidden_layers"]):
        name = f"model.layers.{i}.self_attn"
        for part, size in (("q", 64), ("k", 32), ("v", 32)):
            if family == "Qwen2":
                tensors[f"{name}.{part}_proj.bias"] = 0.3 * torch.randn(size, generator=generator)
            if family == "Qwen3" and part != "v":
                tensors[f"{name}.{part}_norm.weight"] = 1.0 + 0.2 * torch.randn(16, generator=generator)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if vocab_size != len(tensors[name]):
            tensors[name] = 0.15 * torch.randn(vocab_size, 64, generator=generator)
    return tensors


def engine(models: Models, name: str, *overrides: str) -> EngineCore:
    """An engine for one of :data:`MODELS`; a drafter always drafts as far as it can."""
    adaptive = () if "drafter=none" in overrides else ("drafter.adaptive=false",)
    return build_engine(assemble([f"model.path={models.path(name)}", *COMMON, *overrides, *adaptive])).core


def prompts(models: Models, name: str, count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """1 to 60 tokens: text of the bundled model, random ones of the others; many after one beginning, many that
    repeat themselves."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    if name == "bundled":
        pages = json.loads((models.path(name) / "recall.json").read_text())["first_sentences"]
        tokenizer = Tokenizer.from_directory(str(models.path(name)))
        text = tokenizer.encode_now("\n".join(f"{key}: {value}" for key, value in itertools.islice(pages.items(), 200)))
    else:
        text = tuple(draw(0, tiny.CONFIG["vocab_size"]) for _ in range(2000))
    made = []
    for i in range(count):
        start, length = draw(0, len(text) - 70), (1, 7, 8, 9, 16, 23, 40)[i % 7]
        piece = text[start : start + length]
        made.append((piece, text[:17] + piece, (piece * 40)[:length] + piece)[i % 3])
    return made


@dataclass(slots=True)
class Answer:
    """All of what a request came to."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    reason: str | None = None
    timings: Timings | None = None


def answers(core: EngineCore, requests: Sequence[EngineRequest], batch: int) -> list[Answer]:
    """Run requests, ``batch`` at a time, each as soon as there is room for it. Nothing is held afterwards."""
    found = {request.request_id: Answer() for request in requests}
    waiting, open_ids = list(reversed(requests)), set[str]()
    while waiting or core.has_work:
        while waiting and len(open_ids) < batch:
            request = waiting.pop()
            open_ids.add(request.request_id)
            core.submit(request)
        for out in core.step().outputs:
            answer = found[out.request_id]
            assert out.finish_reason != "error", out.error
            answer.tokens += out.tokens
            answer.logprobs += out.logprobs
            if out.finish_reason is not None:
                answer.reason, answer.timings = out.finish_reason, out.timings
                open_ids.discard(out.request_id)
    assert_idle(core)
    return list(found.values())


def assert_idle(core: EngineCore) -> None:
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.rows_used, stats.blocks_leased) == (0, 0, 0, 0), stats
    assert all(blocks.free + blocks.cached == blocks.total for blocks in stats.blocks)


def requests_for(
    prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams], **all_params: Any
) -> list[EngineRequest]:
    """One request a prompt, the parameters in turn."""
    turns = [replace_params(params[i % len(params)], **all_params) for i in range(len(prompts))]
    return [EngineRequest(f"r{i}", prompt, turns[i]) for i, prompt in enumerate(prompts)]


def replace_params(params: SamplingParams, **changes: Any) -> SamplingParams:
    return SamplingParams(**({name: getattr(params, name) for name in params.__struct_fields__} | changes))


def pairwise(factors: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Rows in which every two values of two factors meet at least once; greedy, the same each time."""
    columns = list(itertools.combinations(range(len(factors)), 2))
    pairs = {row: {(a, b, row[a], row[b]) for a, b in columns} for row in itertools.product(*factors)}
    missing = set().union(*pairs.values())
    rows = []
    while missing:
        best = max(pairs, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        rows.append(best)
    return rows
