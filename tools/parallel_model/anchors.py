"""Measured decode speeds that others have published, which the cost model is fitted to and compared with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.contracts.ops.work import Widths

BF16, INT8, MXFP4 = Widths(), Widths(body=8, experts=8, head=8), Widths(experts=4.25)


@dataclass(frozen=True, slots=True)
class Anchor:
    """Milliseconds from token to token."""

    stack: str
    """Whose steps are alike: fitted together."""
    model: str
    device: str
    tp: int
    ms: float
    source: str
    batch: int = 1
    context: int = 256
    """About how many tokens are cached: an assumption where the source does not state prompts."""
    widths: Widths = BF16
    method: str = "one-shot"
    """By which ranks add up: those stacks' own, or NCCL."""
    whole_head: bool = False
    """Each rank multiplies with the whole vocabulary."""
    left_out: str = ""
    """Why it is not fitted to; shown all the same."""


COMPILED, SERVING = "gpt-fast", "vLLM, SGLang"


def anchors() -> Iterator[Anchor]:
    yield from _compiled("Llama-3.1-8B", {1: 94, 2: 149, 4: 217, 8: 276})
    yield from _compiled("Llama-3.1-70B", {2: 16}, left_out="memory nearly full: 73 of 80 GB")
    yield from _compiled("Llama-3.1-70B", {4: 37, 8: 59})
    yield from _compiled("Mixtral-8x7B", {2: 97, 4: 155, 8: 228})
    yield from _compiled("Mixtral-8x7B", {1: 98, 2: 155, 4: 217, 8: 279}, INT8)
    yield Anchor(SERVING, "Llama-3.1-8B", "H100", 1, 1e3 / 133, "vLLM, vllm-project/vllm#16937")
    yield Anchor(SERVING, "Llama-3.1-8B", "H100", 1, 1e3 / 158.34, "SGLang, its documentation of EAGLE, MT-bench")
    yield Anchor(SERVING, "Llama-3.1-8B", "H200", 1, 1e3 / 191.0, "SGLang, SpecForge data; one card is an assumption")
    yield Anchor(SERVING, "Qwen3-8B", "H100", 1, 6.78, "vLLM, Hugging Face Dogacel/Qwen3-8B-DSpark")
    yield Anchor(SERVING, "Qwen3-30B-A3B", "A100-80GB", 1, 9.6, "vLLM, tenstorrent/tt-inference-server#340")
    yield Anchor(
        SERVING, "Qwen3-30B-A3B", "H100", 1, 13.18, "vLLM, vllm-project/vllm#23151, 2,048 tokens in, 1,024 out",
        batch=10, context=2560,
    )  # fmt: skip
    yield Anchor(SERVING, "Qwen3-30B-A3B", "H100", 2, 1e3 / 222, "SGLang, sgl-project/SpecForge#339")
    yield Anchor(SERVING, "Qwen3-30B-A3B", "H100", 4, 1e3 / 219, "SGLang, Tencent/AngelSlim#163")
    yield Anchor(
        SERVING, "Qwen3-30B-A3B", "H100", 1, 1e3 / 130, "SGLang 0.4.9, Tencent/AngelSlim#9",
        left_out="cards not stated; one H100 is a guess",
    )  # fmt: skip
    for batch, ms in {4: 3.72, 8: 4.05, 16: 4.83, 32: 5.82, 64: 7.36}.items():
        yield Anchor(
            SERVING, "gpt-oss-120b", "H100", 8, ms, "vLLM, SemiAnalysisAI/InferenceX#828, 1,024 tokens in and out",
            batch=batch, context=1450, widths=MXFP4,
        )  # fmt: skip
    for (batch, tp), seconds in {(1, 2): 5.50, (1, 4): 3.91, (1, 8): 3.15, (16, 2): 6.07, (16, 4): 4.77}.items():
        yield Anchor(
            SERVING, "QwQ-32B", "A100-80GB", tp, seconds * 5, "vLLM 0.7.2, vllm-project/vllm#16300, 200 tokens out",
            batch=batch, context=100, left_out="links not stated; an older engine, whose host took part in each step",
        )  # fmt: skip
    for tp, rate in {1: 90, 2: 77, 4: 77}.items():
        yield Anchor(
            SERVING, "gpt-oss-120b", "A100-80GB", tp, 1e3 / rate, "vLLM, vllm-project/vllm#22331", widths=MXFP4,
            left_out="first release, card without these formats",
        )  # fmt: skip


def _compiled(model: str, rates: dict[int, float], widths: Widths = BF16, left_out: str = "") -> Iterator[Anchor]:
    """Tokens/s by number of cards."""
    for tp, rate in rates.items():
        yield Anchor(
            COMPILED, model, "A100-80GB", tp, 1e3 / rate, "gpt-fast, its README, cards at 330 W", context=128,
            widths=widths, method="NCCL", whole_head=True, left_out=left_out,
        )  # fmt: skip
