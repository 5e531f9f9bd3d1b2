"""The best that is published, or else what this tool measured before, beside what is measured here.

One table. What it does not have is not known: a row then says so. All are of batch 1 unless the metric says more.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True, slots=True)
class Best:
    """One figure of somebody."""

    metric: str
    """Pattern of the rows that it stands beside, as of a file name."""
    card: str
    """Pattern of the card's name in the table of data sheets."""
    of: str
    """What it is the best of, and how it was measured where that differs from here."""
    value: float | None = None
    """In the unit of those rows."""
    share: float | None = None
    """Where a share of the floor is known instead."""


MEGAKERNEL = "Hazy Research's megakernel (CUDA graphs with dependent launch: {}), 32 tokens in and 128 out"
SGLANG = "SGLang, from output tokens/s, which may have some prefill in it"
EAGLE = "SGLang, EAGLE3 head, on {}: {} tokens a step (chain of {}), real acceptance"
MLA = "FlashMLA on an H800, 660 TFLOP/s of 989 (recalled)"
MOE = "a mixture in bf16 of other sizes by Cohere's megakernel on an H100, 62 % of its data sheet"
HERE = "this tool, 2026-11-26"

TABLE: tuple[Best, ...] = (
    Best("read bandwidth *", "H100", "AutoMegaKernel's measurement", value=3089.0),
    Best("read bandwidth *", "H200", HERE, value=4630.0),
    Best("copy bandwidth", "H200", HERE, value=4260.6),
    Best("bf16 GEMM *", "H200", f"cuBLAS, {HERE}", value=685.4),
    Best("1b: decode, batch 1", "H100", MEGAKERNEL.format("0.980"), value=0.973),
    Best("1b: decode, batch 1", "H200", MEGAKERNEL.format("0.795"), value=0.760),
    Best("serve, 1 at once: ITL p50", "H100", f"without a server: {MEGAKERNEL.format('0.980')}", value=0.973),
    Best("serve, 1 at once: ITL p50", "H200", f"without a server: {MEGAKERNEL.format('0.795')}", value=0.760),
    Best("1b: kernels and copies of a decode step, batch 1", "*", "CUDA graphs with dependent launch", value=100),
    Best("?b: host gap, batch *", "*", "openinfer, 4 bytes a step to the host", value=0.05),
    Best("8b: decode, batch 1", "H100", f"{SGLANG}, MT-Bench", value=6.32),
    Best("8b: decode, batch 1", "H200", f"{SGLANG}, SpecBundle", value=5.24),
    Best("8b: decode, batch 1", "A100-80GB", "gpt-fast, at 330 W", value=10.65),
    Best("8b int8: decode, batch 1", "A100-80GB", "gpt-fast, at 330 W", value=7.27),
    Best("8b bf16: batch 1, plain step", "H100", f"{SGLANG}, MT-Bench", value=6.32),
    Best("8b bf16: batch 1, plain step", "H200", f"{SGLANG}, SpecBundle", value=5.24),
    Best("8b bf16: batch 1, * acceptance length 2 *", "H200", EAGLE.format("FinanceQA", 1.91, 3), value=3.86),
    Best("8b bf16: batch 1, * acceptance length 3 *", "H200", EAGLE.format("GSM8K", 2.85, 5), value=3.03),
    Best("8b bf16: batch 1, * acceptance length 4 *", "H200", EAGLE.format("MT-Bench", 3.91, 7), value=2.20),
    Best("8b bf16: batch 1, * acceptance length 5 *", "H200", EAGLE.format("MATH500", 5.40, 7), value=1.57),
    Best("attention of a layer, prefill *", "H?00", "FlashAttention 3 in fp16 on an H100 (recalled)", share=0.75),
    Best("attention of a layer, MLA *", "H?00", MLA, share=0.67),
    Best("* shape, bf16*: decode, batch 1", "H?00", MOE, share=0.62),
)


def find(metric: str, card: str, floor: float | None) -> dict[str, Any] | None:
    """``value`` and ``of`` for a row, or ``None``. ``card``: its data sheet's name, empty if it has none."""
    for best in TABLE:
        if not (card and fnmatchcase(metric, best.metric) and fnmatchcase(card, best.card)):
            continue
        if best.value is not None:
            return {"value": best.value, "of": best.of}
        if best.share is not None and floor is not None:
            return {"value": floor / best.share, "of": best.of}
    return None
