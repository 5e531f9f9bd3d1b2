"""What this machine is, and what it measures: plain data."""

from __future__ import annotations

import math
import mmap
import os
import platform
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import native
from engine.contracts.ops import LinearPart, LinearSpec
from engine.kernels.cpu.linear import float_linear, integer_linear
from engine.kernels.cpu.linear.rates import fastest_rates, threads
from engine.kernels.linear import PackedLinear
from engine.machine import cpu_times, process_s
from engine_plugins.quantizer.rounding import to_int4, to_int8

READ_BYTES = 1 << 30
"""Larger than the last-level cache that a virtual machine may really use."""
READ_ROUNDS = 5
OUTPUTS, INPUTS = 4096, 1024
ROWS = (1, 8, 64, 512)
ROUNDS = 3
GROUP = 128
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute a linear layer."""

    weights: str
    """How weights are stored, and activations where they are rounded too."""
    instructions: str
    is_chosen: bool
    """The engine takes it for such weights."""
    gflops: dict[int, float]
    """GFLOP/s (of integers: GOP/s) by number of rows."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Figures of :func:`measure`."""

    processor: str
    cpus: int
    """That this process may run on."""
    threads: int
    """That the rates were measured with."""
    caches: dict[str, str]
    """Sizes by level, as the system writes them: "48K". Those of the first CPU: cores may share a level."""
    compiler: str
    torch: str
    read_gb_s: float
    read_one_thread_gb_s: float
    ways: tuple[Way, ...]
    missing: str = ""
    """Why there are no compiled kernels."""
    others: float | None = None
    """CPUs of :attr:`cpus` that other processes and other virtual machines kept busy meanwhile, on average; ``None``
    where the system does not say."""


def measure(num_threads: int | None) -> Machine:
    """Takes some 15 seconds and 1 GiB of memory."""
    allowed = os.sched_getaffinity(0)
    cpus = len(allowed)
    num_threads = num_threads or cpus
    compiler = native.find_compiler()
    started, busy = time.perf_counter(), _others_s(allowed)
    with threads(num_threads):
        several = read_bandwidth()
        compiled = () if isinstance(compiler, str) else (*_float_ways(), *_integer_ways())
        ways = (*compiled, *_torch_ways(is_chosen=not compiled))
    with threads(1):
        one = read_bandwidth()
    busy, seconds = _others_s(allowed) - busy, time.perf_counter() - started
    return Machine(
        processor=_processor(),
        cpus=cpus,
        threads=num_threads,
        caches=dict(_caches()),
        compiler="" if isinstance(compiler, str) else f"{' '.join(compiler.command)}: {compiler.version}",
        torch=torch.__version__,
        read_gb_s=several,
        read_one_thread_gb_s=one,
        ways=ways,
        missing=compiler if isinstance(compiler, str) else "",
        others=None if math.isnan(busy) else max(0.0, busy / seconds),
    )


def read_bandwidth() -> float:
    """GB/s at which torch's number of threads read memory: the best of some rounds."""
    memory = huge_pages(READ_BYTES)
    read, best = reader(memory), float("inf")
    for _ in range(READ_ROUNDS):
        started = time.perf_counter()
        read()
        best = min(best, time.perf_counter() - started)
    return memory.nbytes / best / 1e9


def linear_rate(dtype: torch.dtype) -> float:
    """GFLOP/s of a large product with weights of ``dtype``, as the engine computes it: the best of some rounds."""
    spec, weight = LinearSpec((LinearPart("w", OUTPUTS),), INPUTS), torch.randn(OUTPUTS, INPUTS).to(dtype)
    if isinstance(native.find_compiler(), str):
        layer = _torch_layer(weight)
    else:
        layer = float_linear.pack_float(spec, weight, None, float_linear.best_instructions(dtype))
    return fastest_rates({"": layer}, torch.randn(ROWS[-1], INPUTS).to(dtype), ROUNDS)[""]


def huge_pages(num_bytes: int) -> Tensor:
    """int64 memory in huge pages, as weights are, where the system has them. Written, so that pages are real."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared pages would stay small
    with suppress(OSError, AttributeError):  # a system without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.int64).fill_(1)


def reader(memory: Tensor) -> Callable[[], object]:
    """What reads all of ``memory``, int64, once: as fast as this machine can, or, without a compiler, as torch does."""
    if isinstance(native.find_compiler(), str):
        return memory.sum
    source = Path(__file__).with_name("bandwidth.cpp")
    kernels = native.load(source, {"read_all": (native.POINTER, native.INT64, native.POINTER)})
    total = torch.zeros(1, dtype=torch.int64)
    return lambda: kernels.read_all(native.pointer(memory), memory.nbytes, native.pointer(total))


def _float_ways() -> Iterator[Way]:
    spec = LinearSpec((LinearPart("w", OUTPUTS),), INPUTS)
    for dtype in float_linear.DTYPES:
        weight = torch.randn(OUTPUTS, INPUTS).to(dtype)
        chosen = float_linear.best_instructions(dtype)
        names = float_linear.available(dtype)
        names = names[1:] or names  # plain C++ only where nothing else is there
        layers = {name: float_linear.pack_float(spec, weight, None, name) for name in names}
        yield from _ways(_short(dtype), layers, dtype, chosen)


def _integer_ways() -> Iterator[Way]:
    best = integer_linear.best_instructions()
    if best == integer_linear.INSTRUCTIONS[0]:
        return
    spec = LinearSpec((LinearPart("w", OUTPUTS),), INPUTS)
    weight = torch.randn(OUTPUTS, INPUTS)
    for bits, rounded in ((8, to_int8(weight, None)), (4, to_int4(weight, None, GROUP))):
        for activations in ("bf16", "int8"):
            layer = integer_linear.pack_integer(spec, rounded, activations)
            name = f"int{bits}" + (", int8 activations" if activations == "int8" else "")
            yield from _ways(name, {best: layer}, torch.bfloat16, best)


def _torch_ways(is_chosen: bool) -> Iterator[Way]:
    chosen = "torch" if is_chosen else ""
    for dtype in float_linear.DTYPES:
        layer = _torch_layer(torch.randn(OUTPUTS, INPUTS).to(dtype))
        yield from _ways(_short(dtype), {"torch": layer}, dtype, chosen)


def _torch_layer(weight: Tensor) -> PackedLinear:
    def linear(x: Tensor) -> Tensor:
        return F.linear(x, weight)

    return PackedLinear({}, linear, linear, weight.shape[0])


def _ways(weights: str, layers: dict[str, PackedLinear], dtype: torch.dtype, chosen: str) -> Iterator[Way]:
    rates = {rows: fastest_rates(layers, torch.randn(rows, INPUTS).to(dtype), ROUNDS) for rows in ROWS}
    for name in layers:
        yield Way(weights, name, name == chosen, {rows: rates[rows][name] for rows in ROWS})


def _others_s(cpus: Collection[int]) -> float:
    """Seconds of work of these CPUs since the machine started, less those of this process and the compilers it ran; NaN
    where the system does not say."""
    times = cpu_times(cpus)
    return math.nan if times is None else sum(times) - process_s(os.getpid())


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def _caches() -> Iterator[tuple[str, str]]:
    """For data; nothing where the system does not say."""
    for folder in sorted(CACHES.glob("index*")):
        try:
            level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            yield f"L{level}", size


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
