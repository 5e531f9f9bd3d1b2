"""The lines of figures below an answer, and its waterfall."""

import io

import pytest
from rich.console import Console

from engine_lab.bench.stream import StreamResult
from engine_lab.chat.ask import Answer
from engine_lab.chat.summary import speed_so_far, summary
from engine_lab.chat.why import waterfall

TIMINGS = {
    "ttft_ms": 16.4,
    "predicted_per_second": 213.2,
    "itl_ms": {"count": 59, "p50": 2.91, "p95": 14.72},
    "drafted_tokens": 112,
    "accepted_tokens": 35,
}
ANSWER = Answer(
    10.0,
    StreamResult(
        chunks_s=[10.5, 11.0, 12.5],
        chunk_tokens=[1, 3, 9],
        text=["a", "b", "c"],
        output_tokens=9,
        prompt_tokens=12,
        cached_tokens=8,
        finish_reason="stop",
        timings=TIMINGS,
    ),
)


def test_the_speed_while_an_answer_comes():
    assert speed_so_far(Answer(10.0), 10.25) == "0.2 s, no token yet; Ctrl-C stops"
    assert speed_so_far(ANSWER, 13.0).startswith("9 tokens · 4.0 tok/s · TTFT 500 ms · 12 prompt tokens, 8 cached")


def test_the_summary_is_the_servers_and_as_long_as_fits():
    line = "9 tokens · 213.2 tok/s · TTFT 16 ms · ITL P50 2.9, P95 14.7 ms · drafts 31 %"
    assert summary(ANSWER, 79) == line
    assert summary(ANSWER, 200) == f"{line} · 12 prompt tokens, 8 cached"
    assert summary(ANSWER, 30) == "9 tokens · 213.2 tok/s"


def test_what_was_stopped_has_the_figures_of_the_client():
    said = StreamResult(chunks_s=[10.5, 11.0], text=["a", "b"])
    assert summary(Answer(10.0, said), 79) == "stopped · TTFT 500 ms"
    assert summary(Answer(10.0, StreamResult(finish_reason="length", output_tokens=1)), 79).endswith("1 token")


@pytest.mark.parametrize("width", [80, 200])
def test_a_waterfall_places_each_span_after_the_one_before(width):
    blocked = {"request_id": "chatcmpl-ac6cccb6ab2743b6b17a731c37b2926f-0", "num_tokens": 500, "steps": 1, "of": 2}
    sequence = {
        "cause": "decode 75 %",
        "total_ms": 400.0,
        "unattributed_ms": -0.0001,
        "cached_tokens": 3,
        "prompt_tokens": 12,
        "spans": [
            {"name": "queue", "start_ms": 0.0, "ms": 1.0, "steps": 1, "blocked_by": blocked},
            {"name": "prefill", "start_ms": 1.0, "ms": 99.0, "steps": 2, "gap_ms": 0.25, "inside": []},
            {"name": "decode", "start_ms": 100.0, "ms": 300.0, "steps": 20},
        ],
        "prefix": {"why": "a number differs"},
    }
    console = Console(file=io.StringIO(), width=width)
    console.print(waterfall(sequence, width))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width and not any("…" in line for line in lines)
    bars = [(line.index("█"), line.rindex("█")) for line in lines if "█" in line]
    assert len(bars) == 3 and bars[1][1] < bars[2][0] and bars[2][1] - bars[2][0] > 2 * (bars[1][1] - bars[1][0])
    text = " ".join(console.file.getvalue().split())
    for said in ("500 prompt tokens of 37b2926f-0", "75 %", "0.00 ms unattributed", "3 of 12", "a number differs"):
        assert said in text
