"""From the figures to what is printed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from engine.contracts.command import FAILED, OK, USAGE
from engine_lab.bench_machine.machine import INPUTS, OUTPUTS, ROWS, Machine, measure
from engine_lab.shared.errors import complain
from engine_lab.shared.output import check_writable

SCHEMA = "engine-bench-machine/1"
MUCH_LOAD = 0.1
"""Average number of CPUs that others use, from which on a line says so."""


def run(threads: int | None, json_file: str | None) -> int:
    """Measure, print, and write JSON where it is wanted."""
    if json_file not in (None, "-"):
        try:
            check_writable(json_file)
        except ValueError as error:
            return complain("bench-machine", error, USAGE)
    machine = measure(threads)
    text = json.dumps({"schema": SCHEMA} | asdict(machine), indent=1)
    if json_file == "-":
        print(text)
        return OK
    _show(machine, Console())
    if json_file is not None:
        try:
            Path(json_file).write_text(text + "\n")
        except OSError as error:
            return complain("bench-machine", f"--json {json_file}: {error.strerror or error}", FAILED)
    return OK


def _show(machine: Machine, console: Console) -> None:
    facts = Table.grid(padding=(0, 2))
    caches = ", ".join(f"{level} {_cache_size(size)}" for level, size in machine.caches.items())
    facts.add_row("processor", machine.processor)
    facts.add_row("CPUs", f"{machine.cpus} for this process")
    facts.add_row("threads", str(machine.threads))
    facts.add_row("other load", _other_load(machine))
    facts.add_row("caches", caches or "unknown")
    facts.add_row("compiler", machine.compiler or f"none: {machine.missing}")
    facts.add_row("torch", machine.torch)
    facts.add_row("read bandwidth", f"{machine.read_gb_s:.1f} GB/s, one thread {machine.read_one_thread_gb_s:.1f} GB/s")
    console.print(facts)
    console.print(f"GFLOP/s of a linear layer ({INPUTS} inputs, {OUTPUTS} outputs) by number of rows:", style="italic")
    rates = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)  # 80 columns hold it
    for column in ("weights", "instructions", *(str(rows) for rows in ROWS), "engine"):
        rates.add_column(column, justify="right" if column.isdigit() else "left")
    for way in machine.ways:
        figures = (f"{way.gflops[rows]:,.0f}" for rows in ROWS)
        rates.add_row(way.weights, way.instructions, *figures, "takes it" if way.is_chosen else "")
    console.print(rates)


def _other_load(machine: Machine) -> str:
    if machine.others is None:
        return "unknown"
    load = f"{machine.others:.2f} CPUs"
    return load if machine.others < MUCH_LOAD else f"{load}: all rates may be too low"


def _cache_size(size: str) -> str:
    """``48K`` is 48 KiB, ``491520K`` 480 MiB."""
    kib = size.removesuffix("K")
    if not kib.isdigit():
        return size
    return f"{kib} KiB" if int(kib) % 1024 else f"{int(kib) // 1024} MiB"
