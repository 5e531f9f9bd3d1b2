"""Bytes, kernels, the ledger and the phases of start-up as text. Imports no torch: the API process prints them."""

from __future__ import annotations

from collections.abc import Sequence

from engine.loop.messages import EngineInfo, MemoryLedger, Phase
from engine.ranks.messages import RankInfo


def size(num_bytes: int) -> str:
    """``1.25 GiB``, ``310.4 MiB`` or ``12.0 KiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}" if name == "GiB" else f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes / 2**10:.1f} KiB"


def describe_start(info: EngineInfo) -> str:
    """What start-up found out: notes, kernels, ledger and phases; lines for a terminal."""
    parts = [f"note: {note}" for note in info.notes]
    if info.lowering:
        parts.append(describe_kernels(info.lowering))
    if info.ranks:
        parts.append(describe_ranks(info.ranks))
    if info.ledger is not None:
        parts.append(describe_ledger(info.ledger))
    return "\n".join((*parts, describe_phases(info.phases)))


def describe_ranks(ranks: Sequence[RankInfo]) -> str:
    """A table: who holds what, and how much memory that takes; the engine has as many KV blocks as the rank with the
    fewest."""
    width = max(len(rank.holds) for rank in ranks)
    lines = [f"ranks{'':<{width + 4}}{'weights':>12}{'KV pool':>12}{'KV blocks':>12}"]
    for rank in ranks:
        sizes = f"{size(rank.weights_bytes):>12}{size(rank.kv_bytes):>12}{rank.num_blocks:>12}"
        lines.append(f"  {rank.rank:>3}  {rank.holds:<{width}}  {sizes}  {rank.place}".rstrip())
    return "\n".join(lines)


def describe_kernels(lowering: Sequence[str]) -> str:
    """A table: what runs for each kind of operation."""
    lines = [line.split(": ", 1) for line in lowering]
    width = max(len(name) for name, _ in lines)
    return "\n".join(("kernels", *(f"  {name:<{width}}  {text}" for name, text in lines)))


def describe_ledger(ledger: MemoryLedger) -> str:
    """A table: what each part was estimated to take before loading, and what it took."""
    lines = [
        f"memory on {ledger.device}: {size(ledger.free_bytes)} free before loading, memory.fraction="
        f"{ledger.fraction:g} of it may be used",
        f"  {'':<17}{'estimated':>12}{'measured':>12}",
    ]
    for line in ledger.lines:
        measured = "-" if line.measured_bytes is None else size(line.measured_bytes)
        if line.planned_bytes or line.measured_bytes:
            lines.append(f"  {line.name:<17}{size(line.planned_bytes):>12}{measured:>12}")
    # Loading and the largest step are never at the same time, and the later one takes the memory of the other.
    lines.append(f"  {'peak, at most':<17}{size(ledger.total_bytes):>12}{'':>12}")
    lines.append(f"  {'headroom':<17}{size(ledger.headroom_bytes):>12}{'':>12}")
    lines.append(f"  {'peak so far':<17}{'':>12}{size(ledger.peak_so_far_bytes):>12}")
    if ledger.device == "cpu":
        lines.append("  (pages of the KV pool take memory once they are written)")
    return "\n".join(lines)


def describe_phases(phases: Sequence[Phase]) -> str:
    """``start-up 4.2 s: ...`` on one line."""
    parts = ", ".join(f"{phase.name} {phase.seconds:.2f} s" for phase in phases)
    return f"start-up {sum(phase.seconds for phase in phases):.1f} s: {parts}"
