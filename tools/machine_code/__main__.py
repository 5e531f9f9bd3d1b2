"""``python -m tools.machine_code``: what kernels compile to, for GPUs that are not there.

One row for each kernel, format, number of rows and architecture: registers, spills, shared memory; and of its main loop
tensor-core instructions, instructions for each weight (of decode attention: cached number), the width of loads,
asynchronous copies in flight and single bytes read from shared memory. The ceiling is what a GPU could read of such
numbers if it did nothing but issue those instructions: a warp's scheduler issues one a cycle, for 32 threads. A kernel
whose ceiling is below the card's bandwidth is bound by instructions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tools.machine_code.attention import CACHES, row_of
from tools.machine_code.figures import CARDS, Row
from tools.machine_code.products import FORMATS, MODELS, OPS, SMS, compile_op, tile_of


def products(arch: int, model: str, formats: Sequence[str], rows: Sequence[int], ops: Sequence[str]) -> Iterator[Row]:
    for op in ops:
        for form in formats:
            for count in rows:
                cost = compile_op(op, MODELS[model], count, arch, form)
                tile = tile_of(op, MODELS[model], count, arch, form)
                yield Row.of(f"{model} {op}", form, count, cost, tile.block_n * tile.block_k / (32 * tile.num_warps))


def attention(arch: int) -> Iterator[Row]:
    for kind in ("decode", "prefill"):
        for head_dim in (64, 128):
            for cache in (None, *CACHES):
                yield row_of(kind, head_dim, arch, cache)


def line(row: Row) -> str:
    def shown(value: float | None) -> str:
        return "-" if value is None else str(value)

    return (
        f"{row.kernel:20} {row.format:11} {row.rows:4} sm_{row.arch:<4} {row.registers:4} {row.spills:6} "
        f"{row.smem / 1024:5.1f} {row.tensor_core:4} {row.load_bytes:5} {shown(row.buffers):>7} "
        f"{shown(row.loads_before_wait):>6} {shown(row.instructions_per_weight):>6} {shown(row.ceiling_tb_s):>7} "
        f"{row.narrow_reads:>6}"
    )


HEADING = (
    f"{'kernel':20} {'format':11} {'rows':>4} {'arch':7} {'regs':>4} {'spills':>6} {'KiB':>5} {'mma':>4} {'bytes':>5} "
    f"{'buffers':>7} {'before':>6} {'i/w':>6} {'TB/s':>7} {'narrow':>6}"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.machine_code", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--arch", type=int, action="append", choices=CARDS, help="compute capability (90); repeatable")
    parser.add_argument("--format", action="append", choices=FORMATS, help="of weights (all); repeatable")
    parser.add_argument("--rows", type=int, action="append", help="of the input (1, 4, 16); repeatable")
    parser.add_argument("--op", action="append", choices=OPS, help="a product (all); repeatable")
    parser.add_argument("--model", choices=MODELS, default="8B", help="whose sizes (%(default)s)")
    parser.add_argument("--no-attention", action="store_true", help="products only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    flags = parser.parse_args()
    found: list[Row] = []
    for arch in flags.arch or [90]:
        card, clock, bandwidth = CARDS[arch]
        print(f"sm_{arch}: {card}, {SMS[arch]} multiprocessors at {clock} GHz, {bandwidth} TB/s\n{HEADING}", flush=True)
        rows = products(arch, flags.model, flags.format or [*FORMATS], flags.rows or [1, 4, 16], flags.op or OPS)
        for row in (*rows,) if flags.no_attention else (*rows, *attention(arch)):
            print(line(row), flush=True)
            found.append(row)
    if flags.json is not None:
        flags.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
