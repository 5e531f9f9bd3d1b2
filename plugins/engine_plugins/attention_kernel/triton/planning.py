"""Which kernel serves which row, and in what tiles. Plain arithmetic on the host, from shapes alone.

Nothing here looks at a context length: the same batch shape always gives the same launches, which is what lets a
CUDA graph be captured once and replayed while sequences grow. (The one use of ``kv_lens`` is the *order* of prefill
tiles.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_SPLITS = 32
FEWEST_MOST_SPLITS = 16
"""However large a query tile, its keys may be dealt out this far."""
MERGED_ROWS = 256
"""Parts times queries that one program should merge: 128 KB of float32 at a head size of 128. Chosen, not
tuned on a device."""
MERGED_VALUES = 8192
LARGEST_SPLIT_TILE = 64
MOST_VERIFIED = 32
"""Tokens of a row that are no chunk of a prompt yet."""
CTAS_PER_SM = 2
"""Programs wanted per multiprocessor: two, so that one computes while the other waits for memory."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """Compile-time sizes of a launch."""

    block_m: int
    block_n: int
    block_d: int
    """Of values, and of as many numbers of keys."""
    num_warps: int
    num_stages: int = 2
    """Two: key loads depend on block-table loads, and deeper pipelines of dependent loads cost registers."""
    max_registers: int | None = None
    """Per thread; ``None``: the assembler's choice."""
    block_r: int = 0
    """Of the numbers of keys after those that latent values are made of; 0: there are none."""

    @property
    def options(self) -> dict[str, int]:
        """Of the launch."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}


@dataclass(frozen=True, slots=True)
class Work:
    """One launch: the query tiles ``(row, first packed query)`` and the kernel they run on."""

    split: bool
    block_m: int
    tiles: tuple[tuple[int, int], ...]
    queries: int
    """Most packed queries that a tile holds; at most ``block_m``."""


def split_blocks(itemsize: int, latent: bool = False) -> tuple[int, ...]:
    """Sizes of query tiles of the split kernel. float32 multiplies without tensor cores: its tiles live in registers
    and stay small. Values of latent attention are four times as wide as most: with 64 queries their sums would spill on
    9.0."""
    if latent:
        return (16, 32) if itemsize <= 2 else (16,)
    return (16, 32, LARGEST_SPLIT_TILE) if itemsize <= 2 else (16, 32)


def prefill_block(head_dim: int, itemsize: int, latent: bool = False) -> int:
    """Packed queries per prefill tile: as many as the float32 accumulator leaves registers for."""
    if latent:
        return split_blocks(itemsize, latent)[-1]
    if itemsize > 2:
        return 32
    return 128 if head_dim <= 128 else 64


def tile_shape(
    split: bool,
    block_m: int,
    head_dim: int,
    itemsize: int,
    value_dim: int | None = None,
    capability: tuple[int, int] | None = None,
) -> TileShape:
    """Tile sizes for a head size and compute dtype (``itemsize`` in bytes). ``value_dim``: of latent attention.
    ``capability``: of the GPU; ``None``: a new one.

    A key tile of 16 KB (float32: 8 KB) lets two stages of keys and values and the queries fit the 99 KB of shared
    memory of compute capability 8.9, and keeps the decode path free of register spills on 8.0, 8.9 and 9.0. Before 9.0
    operands of products pass through registers: large query tiles of wide heads take half of the keys, or they spill.
    """
    if value_dim is not None:
        return _latent_tile(block_m, head_dim, itemsize, value_dim)
    block_d = _power_of_two(head_dim)
    tile_bytes = 16384 if itemsize <= 2 else 8192
    block_n = min(64, max(16, tile_bytes // (block_d * itemsize)))
    if not split and itemsize <= 2 and block_d > 64 and capability is not None and capability < (9, 0):
        block_n = min(block_n, 32)
    wide = not split if itemsize <= 2 else block_m * block_d >= 32 * 256
    # Left alone, the assembler spills words of half-empty tiles to reach a step of occupancy that shared memory denies.
    roomy = split and itemsize <= 2 and block_m == 16 and head_dim < block_d
    return TileShape(block_m, block_n, block_d, 8 if wide else 4, max_registers=168 if roomy else None)


def _latent_tile(block_m: int, head_dim: int, itemsize: int, value_dim: int) -> TileShape:
    """32 keys of 576 numbers are 36 KB; with queries two stages of them fit into 99 KB, as values are not loaded. Eight
    warps share the sums: with four, keys of 8 bits would spill."""
    block_d = _power_of_two(value_dim)
    block_r = _power_of_two(head_dim - value_dim) if head_dim > value_dim else 0
    if itemsize > 2:
        return TileShape(block_m, 16, block_d, 8, num_stages=1, block_r=block_r)
    return TileShape(block_m, 32, block_d, 8, block_r=block_r)


def _power_of_two(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def plan_work(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    num_sms: int,
    latent: bool = False,
) -> tuple[Work, ...]:
    """Partition the rows of a batch into launches. ``group``: query heads per kv head.

    Long rows go to the prefill kernel if together they occupy at least half of the multiprocessors; else all rows
    go to the split kernel, in the smallest query tile that holds them. Rows without queries get no tile.

    In latent attention one token has more queries than any tile: a row is long by its tokens. Every tile reads all of
    a row's keys again, from the L2 cache; so tiles are large once parts of them fill the device.
    """
    sizes, chunk_m = split_blocks(itemsize, latent), prefill_block(head_dim, itemsize, latent)
    if latent:
        many = sum(-(-q_len * group // sizes[-1]) for q_len in q_lens) * num_kv_heads * FEWEST_MOST_SPLITS >= num_sms
        sizes = sizes[-1:] if many else sizes[:1]
    most = sizes[-1] if not latent else MOST_VERIFIED * group
    long = [row for row, q_len in enumerate(q_lens) if q_len * group > most]
    long_programs = num_kv_heads * sum(-(-q_lens[row] * group // chunk_m) for row in long)
    chunked = set(long) if 2 * long_programs >= num_sms else set()

    split_rows: dict[int, list[int]] = {}
    for row, q_len in enumerate(q_lens):
        if q_len and row not in chunked:
            size = next((m for m in sizes if q_len * group <= m), sizes[-1])
            split_rows.setdefault(size, []).append(row)

    works = []
    for m, rows in sorted(split_rows.items()):
        queries = min(m, group * max(q_lens[row] for row in rows))
        works.append(Work(True, m, query_tiles(rows, q_lens, group, m), queries))
    if chunked:
        tiles = query_tiles(sorted(chunked), q_lens, group, chunk_m)
        # Heaviest first: the last programs to start are then the short ones, and the device drains evenly.
        heavy = sorted(tiles, key=lambda t: q_lens[t[0]] - kv_lens[t[0]] - t[1] // group)
        works.append(Work(False, chunk_m, tuple(heavy), chunk_m))
    return tuple(works)


def query_tiles(rows: Sequence[int], q_lens: Sequence[int], group: int, block_m: int) -> tuple[tuple[int, int], ...]:
    return tuple((row, start) for row in rows for start in range(0, q_lens[row] * group, block_m))


def num_splits(num_programs: int, num_sms: int, queries: int) -> int:
    """Parts each query tile's keys are cut into, so that about ``CTAS_PER_SM`` programs run per multiprocessor.

    Fewer for tiles of many ``queries``: one program reads all their parts when it merges, and it reads alone.
    """
    most = min(MAX_SPLITS, max(FEWEST_MOST_SPLITS, MERGED_ROWS // queries))
    return max(1, min(most, -(-CTAS_PER_SM * num_sms // num_programs)))


def merge_shape(splits: int, block_m: int, block_d: int) -> tuple[int, int]:
    """``(lanes, queries at a time)`` of the merge: two sizes of lanes for all numbers of splits, so that few kernels
    are compiled, and 64 values per thread of 128, all loaded at once."""
    lanes = FEWEST_MOST_SPLITS if splits <= FEWEST_MOST_SPLITS else MAX_SPLITS
    return lanes, max(1, min(block_m, MERGED_VALUES // (lanes * block_d)))


def scratch_tiles(num_sms: int) -> int:
    """Most query tiles (times kv heads) that are ever split: beyond the wanted number of programs none is."""
    return CTAS_PER_SM * num_sms


def scratch_rows(num_sms: int) -> int:
    """Most packed queries whose parts exist at once: ``num_programs * num_splits * block_m`` at its largest.

    Splitting happens only below the wanted number of programs and rounds up, so less than twice that many run.
    """
    return 2 * CTAS_PER_SM * num_sms * LARGEST_SPLIT_TILE
