"""Other tiles, in chains of a model's products: which would be faster with another one, and cuts of attention.

A kernel measured alone says little of a step: one that is launched early shares the device with the one before. So the
products of a few layers and of the head are launched one after another as a step has them, attention left out, and the
chain is captured anew with one product's tile changed, for each alternative; then with the fastest tile of every
product together. Workers compile side by side and measure one after another.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.contracts.quantizer import QuantizedWeight, TileLoader
from engine.kernels.quantized import from_e2m1
from engine.kernels.triton import launch
from engine.kernels.triton.launch import Launch, NormWeight, SkinnyLinear
from engine.kernels.triton.quantized.loaders import tile_loader
from engine.kernels.triton.tiles import MAX_ROWS, SkinnyTile
from engine.kernels.triton.weights import load_plain
from gpu_check import floors
from gpu_check.attention_cuts import CUT_METRICS, cut_attention
from gpu_check.formats import Format
from gpu_check.in_turns import COMPILE_S, captured, replaced, suppress_and_say, wait_for_all
from gpu_check.linears import Layer, cache_for, heads_of
from gpu_check.section import Context, Row, time_row
from gpu_check.shapes import EPS, SHAPES, TINY, Shape
from gpu_check.timing import device_ms

Tile = tuple[int, int, int, int]
"""Columns, inputs, warps, stages."""
Size = tuple[int, int]
"""Output and input features of a product."""

ONE_ROW: tuple[Tile, ...] = (
    (4, 1024, 4, 1), (8, 512, 4, 1), (8, 1024, 8, 1), (16, 256, 4, 1), (16, 256, 8, 1), (16, 512, 8, 1),
)  # fmt: skip
ONE_ROW_PACKED: tuple[Tile, ...] = (
    (8, 512, 4, 1), (8, 1024, 4, 1), (8, 1024, 8, 1), (16, 256, 4, 1), (16, 512, 4, 1), (16, 512, 8, 1),
    (32, 256, 8, 1),
)  # fmt: skip
FEW_ROWS: tuple[Tile, ...] = (
    (16, 128, 2, 5), (16, 256, 2, 4), (32, 128, 2, 4), (32, 256, 4, 3), (64, 128, 4, 4),
)  # fmt: skip
FEW_ROWS_NORMED: tuple[Tile, ...] = ((64, 64, 4, 5), (64, 128, 8, 4), (64, 256, 4, 2), (128, 64, 4, 4))
FEW_ROWS_PACKED: tuple[Tile, ...] = (
    (16, 128, 2, 5), (32, 128, 2, 4), (32, 128, 4, 4), (64, 64, 2, 4), (64, 64, 4, 5), (64, 128, 4, 4),
)  # fmt: skip
MORE_ROWS: tuple[Tile, ...] = ((32, 128, 4, 4), (64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4))
LAYERS = 4


@dataclass(frozen=True, slots=True)
class Job:
    """A model's shape, a weight format, and how many rows there are; ``normed``: kernels norm their inputs."""

    model: str
    format: str
    rows: int
    normed: bool = True

    def __str__(self) -> str:
        return f"{self.model}, {self.format}, {self.rows} rows{'' if self.normed else ', no norms'}"


JOBS = (
    *(Job("8b", "int4", rows) for rows in (1, 4, 16)), *(Job("8b", "fp8", rows) for rows in (1, 4, 16)),
    *(Job("8b", "bf16", rows) for rows in (1, 4, 16)), *(Job("1b", "bf16", rows) for rows in (1, 4, 16)),
    Job("8b", "int4", 64, normed=False), Job("8b", "fp8", 64, normed=False), Job("8b", "int8", 1),
    Job("8b", "mxfp4", 1), Job("8b", "mxfp4", 4), Job("8b", "bf16", 4, normed=False),
    Job("1b", "bf16", 4, normed=False),
)  # fmt: skip


def run(context: Context) -> None:
    spawn = multiprocessing.get_context("spawn")
    every = (Job("1b", "bf16", 1), Job("1b", "int4", 3)) if context.dry_run else JOBS
    jobs = [job for job in every if not context.has(title(job))]
    cuts_attention = not context.dry_run and not context.has(*CUT_METRICS)
    turn, ready = spawn.Lock(), spawn.Barrier(len(jobs) + cuts_attention)
    workers = [spawn.Process(target=guarded, args=(job, context, turn, ready)) for job in jobs]
    if cuts_attention:
        workers.append(spawn.Process(target=cut_attention, args=(context, turn, ready)))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def guarded(job: Job, context: Context, turn: Any, ready: Any) -> None:
    """A worker. The others do not wait for one that fails."""
    try:
        work(job, context, turn, ready)
    except Exception:
        traceback.print_exc()
        context.emit(Row(title(job), None, detail=traceback.format_exc()[-600:], held=False))
        wait_for_all(ready)


class Chain:
    """Products of a few layers and of the head, each with weights of its own."""

    def __init__(self, job: Job, shape: Shape, device: str) -> None:
        self.job, self.shape = job, shape
        self.case = Layer(shape, torch.float32 if device == "cpu" else torch.bfloat16, device, job.rows)
        self.launch = Launch.on(device)
        self.bytes = self.weights = 0
        q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        hidden, ffn = shape.hidden_size, shape.intermediate_size
        self.layers = [
            (
                self.linear(q + 2 * kv, hidden, True), self.linear(hidden, q), self.linear(2 * ffn, hidden, True),
                self.linear(hidden, ffn),
            )
            for _ in range(LAYERS)
        ]  # fmt: skip
        self.head = self.linear(shape.vocab_size, hidden, True)
        self.heads, _ = heads_of(self.case)
        self.slots, self.cache, self.tables = cache_for(self.case)
        if device != "cpu":
            torch.cuda.empty_cache()
        self.start = self.case.random(job.rows, hidden)
        self.x, self.wide = self.start.clone(), self.case.random(job.rows, ffn)

    def linear(self, out_features: int, in_features: int, is_normed: bool = False) -> SkinnyLinear:
        loader = self.loader(out_features, in_features)
        norm = self.case.norm(in_features) if is_normed and self.job.normed else None
        if norm is not None:
            norm = NormWeight(norm.weight.to(self.case.dtype), EPS)
        parts = (loader.weight, loader.scale, loader.zero, loader.channel_scale)
        self.bytes += sum(part.numel() * part.element_size() for part in parts if part is not None)
        self.weights += out_features * in_features
        return SkinnyLinear(self.launch, loader, in_features, out_features, norm)

    def loader(self, out_features: int, in_features: int) -> TileLoader:
        """Random weights; those of the head in at most 8 bits where the others have fewer."""
        kind, device = self.job.format, self.case.device
        if kind == "bf16":
            weight = torch.randn(out_features, in_features, dtype=self.case.dtype, device=device)
            return TileLoader(load_plain, weight.mul_(in_features**-0.5))
        if out_features == self.shape.vocab_size:
            kind = "int8"
        if kind == "mxfp4":
            bits = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8, device=device)
            exponents = torch.randint(-9, -6, (out_features, in_features // 32), device=device)
            return tile_loader(QuantizedWeight(from_e2m1(bits), torch.exp2(exponents.float()), 32, bits=4, e2m1=True))
        form = Format(kind, group_size=128 if kind == "int4" else None)
        return tile_loader(form.weight(out_features, in_features, device))

    def __call__(self) -> None:
        self.x.copy_(self.start)
        for qkv, out, gate_up, down in self.layers:
            if self.job.rows > MAX_ROWS:
                q = qkv.store(self.x)[:, : out.in_features].contiguous()
                self.x.copy_(out.store(q))
                gate_up.store(self.x)
                self.x.copy_(down.store(self.wide))
                continue
            q = qkv.rope_write(self.x, self.heads, self.tables, self.slots, self.cache).flatten(1)
            out.add(q, self.x)
            down.add(gate_up.gate(self.x, "silu"), self.x)
        if self.job.rows > MAX_ROWS:
            self.head.store(self.x)
        else:
            self.head.logits(self.x, greedy=True)


def work(job: Job, context: Context, turn: Any, ready: Any) -> None:
    started = time.monotonic()
    chain = Chain(job, TINY if context.dry_run else SHAPES[job.model], context.device)
    asked: dict[Size, tuple[Tile, int, bool]] = {}
    with chosen({}, asked):
        versions = {"default": captured(chain, context.device)}
    tried: dict[str, tuple[Size, Tile]] = {}
    for size, (own, bits, is_normed) in asked.items():
        for tile in alternatives(job.rows, bits, is_normed)[: 1 if context.dry_run else None]:
            name = f"{size[0]} x {size[1]}: {tile}"
            if tile == own or time.monotonic() - started > COMPILE_S:
                continue
            with suppress_and_say(f"{job}, {name}"), chosen({size: tile}, {}):
                versions[name] = captured(chain, context.device)
                tried[name] = size, tile
    wait_for_all(ready)
    with turn:
        found: dict[str, Any] = {name: timed(call, context) for name, call in versions.items()}
        best: dict[Size, Tile] = {}
        for size in asked:
            times = {tile: found[name] for name, (of, tile) in tried.items() if of == size}
            if times and min(times.values()) < found["default"]:
                best[size] = min(times, key=lambda tile: times[tile])
        with suppress_and_say(f"{job}, fastest"), chosen(best, {}):
            found["fastest together"] = timed(captured(chain, context.device), context)
        found["default again"] = timed(versions["default"], context)
    found["own tiles"] = {f"{out} x {size}": list(tile) for (out, size), (tile, _, _) in asked.items()}
    found["fastest tiles"] = {f"{out} x {size}": list(tile) for (out, size), tile in best.items()}
    found["bytes"] = chain.bytes
    found["GB/s"] = round(chain.bytes / found["default"] / 1e3)
    if context.dry_run:
        context.emit(Row(title(job), "run", detail="nothing is timed"))
        return
    bars = context.bars(floors.linears(chain.bytes, chain.weights, job.rows)).times(1e3)
    context.emit(time_row(title(job), found["default"], bars, unit="us", detail=found))


def title(job: Job) -> str:
    """Of its row."""
    return f"{job}: {LAYERS} layers and head"


def timed(call: Callable[[], Any], context: Context) -> float:
    """Microseconds; without a meaning in a dry run, where nothing is timed."""
    if context.dry_run:
        return 1.0
    return round(device_ms(call, context.device, repeats=7) * 1e3, 1)


def alternatives(rows: int, bits: int, is_normed: bool) -> Sequence[Tile]:
    if rows == 1:
        return ONE_ROW if bits >= 16 else ONE_ROW_PACKED
    if rows > MAX_ROWS:
        return MORE_ROWS
    if bits < 16:
        return FEW_ROWS_PACKED
    return FEW_ROWS_NORMED if is_normed else FEW_ROWS


@contextmanager
def chosen(tiles: dict[Size, Tile], asked: dict[Size, tuple[Tile, int, bool]]) -> Iterator[None]:
    """Launches take these tiles instead of their own; ``asked`` has what they would have taken."""
    original: Callable[..., SkinnyTile] = launch.skinny_tile

    def other(
        rows: int, out: int, size: int, sms: int, bits: int, is_normed: bool = False, has_words: bool = False
    ) -> SkinnyTile:
        own = original(rows, out, size, sms, bits, is_normed, has_words)
        asked[out, size] = ((own.block_n, own.block_k, own.num_warps, own.num_stages), bits, is_normed)
        if (out, size) not in tiles:
            return own
        n, k, warps, stages = tiles[out, size]
        own = original(rows, out, size, sms, bits, is_normed)
        return replace(own, block_n=n, block_k=k, num_warps=warps, num_stages=stages)

    with replaced(launch, "skinny_tile", other):
        yield
