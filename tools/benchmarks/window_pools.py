"""How a KV pool is split between layers that keep every token and layers with a window, and what that is worth.

    python tools/benchmarks/window_pools.py                      # all shapes
    python tools/benchmarks/window_pools.py --only gemma --rows 128 --pools 4 16 64

For shapes of real models and for KV pools from small to large: how many requests run at once, and how many prompt
tokens are cached when they come back. Scheduler, allocator and loop are the real ones, on a device that computes
nothing. `shared` is what one pool of bytes for all groups could run at once, with nothing lost at borders; `again` is
the share of tokens found cached by the same prompts, `next turn` by prompts that go on after the answers.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.contracts.events import PrefixCacheEvent, StepEvent
from engine.contracts.model import DeviceFacts
from engine.contracts.request import EngineRequest, SamplingParams
from engine.contracts.step_cost import StepCost
from engine.kv.groups import PoolShape, cache_groups
from engine.startup.memory.estimate import estimate_memory
from engine.startup.memory.weights import WeightSizes
from engine_lab.shared.simulation.clock import VirtualClock
from engine_lab.shared.simulation.device import SimulatedDevice
from engine_lab.shared.simulation.engine import make_core
from engine_lab.shared.simulation.spec import EngineSpec
from engine_lab.shared.stated import bind_stated, stated_plan

CARD = DeviceFacts("cuda", "a stated card", (9, 0), 80 << 30)
LOADS = ((16, 1500), (32, 300), (16, 8000), (4, 30_000))
"""Requests and the tokens of each prompt."""
OUTPUT = 64


def _qwen2(layers: int, full: int, window: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 2048, "num_hidden_layers": layers,
        "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 8192, "vocab_size": 32_000,
        "max_position_embeddings": 131_072, "use_sliding_window": True, "sliding_window": window,
        "max_window_layers": full, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    }  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
        "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 2880, "num_local_experts": experts, "num_experts_per_tok": 4, "vocab_size": 201_088,
        "sliding_window": 128, "max_position_embeddings": 131_072, "attention_bias": True, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }  # fmt: skip


def _gemma3(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "intermediate_size": 4 * hidden, "vocab_size": 262_208, "sliding_window": 1024,
        "sliding_window_pattern": 6, "max_position_embeddings": 131_072, "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip


MISTRAL = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 32_000,
    "sliding_window": 4096, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5,
}  # fmt: skip
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "intermediate_size": 5120, "vocab_size": 151_936, "max_position_embeddings": 262_144, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    name: str
    config: dict[str, Any]
    overrides: tuple[str, ...] = ()
    pools: tuple[float, ...] = (1, 4, 16)
    """GiB; none: ``memory.kv_tokens`` says how large the pool is."""


WHOLE = ("model.max_len=131072",)
SHORT = ("model.max_len=4096",)
SHAPES = (
    Shape("half window 1024", _qwen2(28, 14, 1024), (*WHOLE, "memory.kv_tokens=131072"), ()),
    Shape("half window 1024", _qwen2(28, 14, 1024), (*SHORT, "memory.kv_tokens=131072"), ()),
    Shape("gpt-oss-20b", _gpt_oss(24, 32), WHOLE, (4, 16, 48)),
    Shape("gpt-oss-20b", _gpt_oss(24, 32), SHORT),
    Shape("gpt-oss-120b", _gpt_oss(36, 128), WHOLE, (6, 16, 48)),
    Shape("gemma-3-4b", _gemma3(34, 2560, 8, 4, 256), WHOLE, (4, 8, 16, 48)),
    Shape("gemma-3-4b", _gemma3(34, 2560, 8, 4, 256), SHORT),
    Shape("gemma-3-12b", _gemma3(48, 3840, 16, 8, 256), WHOLE, (10, 16, 48)),
    Shape("gemma-3-27b", _gemma3(62, 5376, 32, 16, 128), WHOLE, (12, 16, 48)),
    Shape("gemma-3-27b", _gemma3(62, 5376, 32, 16, 128), SHORT, (2, 4, 16)),
    Shape("mistral-7b window 4096", MISTRAL, (), (1, 4, 16)),
    Shape("mistral-7b window 4096", MISTRAL, ("memory.kv_tokens=32768",), ()),
    Shape("qwen3-next-80b states", QWEN3_NEXT, ("model.max_len=32768",), (32, 48)),
)


@dataclass(frozen=True)
class Served:
    at_once: int
    again: float
    """Share of prompt tokens that are cached when the same prompts come again."""
    next_turn: float
    """The same of prompts that go on after the answers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="shapes whose name has this")
    parser.add_argument("--rows", type=int, default=32, help="scheduler.max_requests")
    parser.add_argument("--pools", type=float, nargs="+", help="GiB, instead of those of each shape")
    arguments = parser.parse_args()
    loads = "".join(f"{f'{count} x {tokens:,}':>34}" for count, tokens in LOADS)
    print(f"{'':<48}{'tokens':>18}{loads}")
    columns = f"{'at once':>9}{'shared':>8}{'again':>6}{'next turn':>11}" * len(LOADS)
    print(f"{'shape':<24}{'max_len':>9}{'pool, GiB':>15}{'full':>9}{'window':>9}{columns}")
    for shape in SHAPES:
        if arguments.only in shape.name:
            for line in _lines(shape, arguments.rows, arguments.pools or shape.pools):
                print(line, flush=True)


def _lines(shape: Shape, rows: int, pools: Sequence[float]) -> Iterator[str]:
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**shape.config, "torch_dtype": "bfloat16"}))
        overrides = (
            f"model.path={folder}", f"scheduler.max_requests={rows}", "overlap=true", "drafter=none",
            "execution=eager", "attention_kernel=torch", *shape.overrides,
        )  # fmt: skip
        try:
            plan = stated_plan(overrides, (), CARD)
        except AssemblyError as error:
            raise SystemExit(error.text()) from error
        bound = bind_stated(plan)
        found = estimate_memory(plan, WeightSizes(0, 0), bound)
        pool, caches = found.pool, cache_groups(bound.graph.caches)
        stated = plan.settings.memory.kv_tokens is not None
        sizes = [pool.num_bytes(found.smallest_blocks)] if stated else [int(gib * 2**30) for gib in pools]
        for size in sizes:
            blocks = pool.fitting(size, found.largest_blocks)
            name = f"{shape.name:<24}{plan.max_len:>9}{size / 2**30:>15.2f}"
            if blocks < found.smallest_blocks:
                yield f"{name}  does not hold a request of model.max_len"
                continue
            groups = pool.groups(caches, blocks)
            kinds = {group.kind: (group.num_blocks - 1) * plan.block_size for group in groups}
            full, window = kinds.pop("full", 0), sum(kinds.values())
            cells = ""
            for count, tokens in LOADS:
                if tokens + 2 * OUTPUT > min(plan.max_len, (blocks - 1) * plan.block_size):
                    cells += f"{'-':>9}{'':>25}"
                    continue
                served = _serve(plan, blocks, count, tokens)
                shared = _shared(pool, size, count, tokens)
                cells += f"{served.at_once:>9}{shared:>8}{served.again:>6.0%}{served.next_turn:>11.0%}"
            yield f"{name}{full:>9}{window:>9}{cells}"


def _shared(pool: PoolShape, size: int, count: int, tokens: int) -> int:
    """At once in a pool of bytes, when the step's tokens have been taken."""
    end = tokens + OUTPUT
    taken = 0.0
    for reach, block_bytes in zip(pool.reaches, pool.block_bytes, strict=True):
        held = 4 * pool.block_size if reach.kind == "state" else min(end, (reach.tokens or end) + pool.block_size)
        taken += held * block_bytes / pool.block_size
    return min(count, pool.max_requests, int(size / taken))


def _serve(plan: EnginePlan, blocks: int, count: int, tokens: int) -> Served:
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(1000) for _ in range(tokens)) for _ in range(count)]
    again = _Served(plan, blocks)
    at_once, _, answers = again(prompts)
    turns = _Served(plan, blocks)
    turns(prompts)
    _, next_turn, _ = turns([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    return Served(at_once, again(prompts)[1], next_turn)


class _Served:
    """An engine on a device that computes nothing."""

    def __init__(self, plan: EnginePlan, blocks: int) -> None:
        clock, cost = VirtualClock(), StepCost(1.0, 0.01, 100)
        self._device = SimulatedDevice(clock, cost, None, seed=0)
        self._core = make_core(EngineSpec(plan, blocks, cost), self._device, clock)

    def __call__(self, prompts: Sequence[tuple[int, ...]]) -> tuple[int, float, list[tuple[int, ...]]]:
        """How many ran at once, the share of tokens that were cached, and the answers."""
        rng, first = random.Random(1), len(self._device.outputs)
        answers = [tuple(rng.randrange(1000) for _ in range(OUTPUT)) for _ in prompts]
        for seed, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), start=first):
            self._device.outputs[seed] = answer
            sampling = SamplingParams(max_tokens=OUTPUT, temperature=0.0, seed=seed)
            self._core.submit(EngineRequest(str(seed), prompt, sampling))
        at_once = cached = 0
        while self._core.has_work:
            for event in self._core.step().events:
                if isinstance(event, StepEvent):
                    at_once = max(at_once, event.running)
                if isinstance(event, PrefixCacheEvent):
                    cached += event.hits
        return at_once, cached / sum(map(len, prompts)), answers


if __name__ == "__main__":
    main()
