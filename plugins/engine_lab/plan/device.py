"""The device of a plan: a row of the table, or the machine the command runs on, which is probed."""

from __future__ import annotations

import torch

from engine.contracts.model import DeviceFacts
from engine.kernels.cpu.linear.rates import threads
from engine_lab.bench_machine.machine import linear_rate, read_bandwidth
from engine_lab.shared.estimates.devices import DataSheet, Device, sheet
from engine_lab.shared.estimates.efficiency import Efficiency
from engine_lab.shared.estimates.errors import EstimateError

HERE = "here"
MOST_CARDS = 8
CPU = Efficiency(
    bandwidth=0.86,
    layer_us=245.0,
    flops=0.75,
    source="fitted to steps of this engine on a CPU: docs/measured.md, 'Against the machine'",
)
"""What this engine reaches of what is probed."""
GPU = Efficiency(
    bandwidth=0.76,
    layer_us=11.0,
    mixture_us=32.0,
    flops=0.57,
    source="fitted to steps of this engine in bfloat16 on one H200: docs/measured.md, 'GPU'; mixtures: assumed",
)
"""What it reaches of a card's data sheet: 1B and 8B shapes at batch 1, and prompts of 8,192 tokens of the latter."""


def listed(name: str) -> DataSheet:
    """A card of the table that the engine runs on. Raises :class:`EstimateError`."""
    found = sheet(name)
    if found.kind == "cpu":
        gb_s = found.figures["bandwidth_gb_s"]
        raise EstimateError(
            f"--device {name}: a CPU is probed, not looked up (its channels allow {gb_s:g} GB/s; what a "
            "machine attains is often a fraction): run 'engine plan --device here' on it"
        )
    if found.capability is None:
        raise EstimateError(f"--device {name}: the engine has no kernels for it; it runs on CUDA cards and on CPUs")
    return found


def facts_of(card: DataSheet) -> DeviceFacts:
    """As the engine would see a machine with several of these."""
    return DeviceFacts("cuda", card.name, card.capability, card.memory, count=MOST_CARDS)


def flops_key(activations: object, card: DataSheet) -> str:
    """Which rate of products counts. ``activations``: what the quantizer rounds them to."""
    key = {"fp8": "fp8_tflops", "int8": "int8_tflops"}.get(str(activations), "bf16_tflops")
    return key if key in card.figures else "bf16_tflops"


def probed(facts: DeviceFacts, dtype: str) -> Device:
    """This machine's CPU: how fast it reads and multiplies now; takes some seconds. Raises :class:`EstimateError` for a
    GPU."""
    if facts.kind != "cpu":
        raise EstimateError(
            f"--device here: {facts.name} is not probed; name it as the table does, as in --device H100"
        )
    with threads(torch.get_num_threads()):
        bandwidth = read_bandwidth() * 1e9
        rate = linear_rate(getattr(torch, dtype)) * 1e9
    return Device(HERE, facts.memory_bytes, bandwidth, rate, bandwidth, "probed now: large reads and products")


def efficiency_of(kind: str) -> Efficiency:
    """Of a kind of device."""
    return CPU if kind == "cpu" else GPU
