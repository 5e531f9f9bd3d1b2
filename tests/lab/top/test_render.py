"""How a frame lies on the terminal."""

import io
import re

import msgspec
import pytest
from rich.console import Console
from rich.text import Text

from engine.machine import MachineUse
from engine_lab.top.frame import Frame, Group, Minute, Percentiles, Rates, Store
from engine_lab.top.render import render
from engine_lab.top.sparkline import bar, sparkline

ID = "chatcmpl-ac6cccb6ab2743b6b17a731c37b2926f-0"
SLOW = {
    "request_id": ID,
    "total_ms": 1234567.8,
    "ttft_ms": 123456.0,
    "tpot_ms": 12593.4,
    "prompt_tokens": 81300,
    "cached_tokens": 192,
    "output_tokens": 1024,
    "cause": f"decode 97 %, beside 573 prompt tokens of {ID}",
}
BUSY = MachineUse(64, 0.57, 33.4, 0.05, None, None, 97.0)
FRAME = Frame(
    running=256,
    waiting=3,
    rates=Rates(12345.6, 98765.4, 101.5),
    minute=Minute(
        1205.28,
        101.16,
        1073.68,
        10.74,
        19.7,
        255.9,
        0.3,
        0.63,
        3.75,
        12,
        MachineUse(64, 0.57, 33.4, 0.05, None, None, 97.0),
    ),
    latency={
        **{f"{name}_ms": Percentiles(20000, 1141.4, 9452.17, 123456.78) for name in ("ttft", "itl", "tpot", "e2e")},
        "queue_ms": Percentiles(0, None, None, None),
    },
    kv=(Group("full", 8192, 7500, 500), Group("window_4096", 1024, 100, 0)),
    series={name: tuple(map(float, range(60))) for name in ("output_tokens", "prefill_tokens", "requests")}
    | {"running": (256.0,) * 60, "waiting": (0.0,) * 60},
    slowest=(SLOW,) * 32,
)


FLEET = msgspec.structs.replace(
    FRAME,
    latency={},
    engines={f"replica-{number}": FRAME for number in range(3)},
    states={"replica-0": "ready", "replica-1": "restarting", "replica-2": "ready"},
)


STORED = msgspec.structs.replace(
    FRAME, stores=(Store("host", 123456, 8 * 2**30, 16 * 2**30, 0), Store("disk", 9876543, 2**40, 2**41, 12))
)


def lines(width: int, height: int | None = None, frame: Frame = FRAME, **terminal: bool) -> list[str]:
    console = Console(file=io.StringIO(), width=width, **terminal)
    console.print(render(Text("engine top"), frame, width, height))
    return console.file.getvalue().splitlines()


def test_stores_are_shown_with_their_faults():
    shown = "\n".join(lines(80, None, STORED))
    assert "8.00 GiB of 16.00 GiB, 0 tokens loaded\n" in re.sub(r" +\n", "\n", shown) and "12 faults" in shown


@pytest.mark.parametrize("frame", [FRAME, FLEET])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (147, 40), (148, 24), (200, 50)])
def test_a_frame_fits_its_terminal(width, height, frame):
    shown = lines(width, height, frame)
    assert len(shown) <= height and max(map(len, shown)) <= width
    assert not any("…" in line for line in shown if "not ready" not in line), "nothing is cut"


@pytest.mark.parametrize("width", [80, 200])
def test_a_frame_has_all_its_figures(width):
    shown = "\n".join(lines(width))
    for figure in (
        "12,345.6 tok/s", "101.5 req/s", "123,456.78", "20,000", "1,205.28", "= gap", "1,073.68", "+ in line",
        "19.70", "255.9", "57% of its time", "33.4 of 64 CPUs", "steal 5%", "92 % used",
        "window_4096", "30 % of prompt tokens", "12 preemptions", "63 % accepted", "length 3.75", "1,234,568 ms",
        "123,456", "81,300", "last 5 s: rates",
    ):  # fmt: skip
        assert figure in shown


@pytest.mark.parametrize("width", [80, 200])
def test_a_fleet_has_a_row_for_each_engine_and_one_that_adds_up(width):
    shown = lines(width, frame=FLEET)
    rows = [line[line.index("replica-") :].split() for line in shown if "replica-" in line and "not ready" not in line]
    assert [row[:6] for row in rows] == [[f"replica-{at}", "256", "3", "82", "%", "12,345.6"] for at in range(3)]
    assert all({"1,141.4", "9,452.2"} <= set(row) for row in rows)
    red = [line for line in lines(width, frame=FLEET, force_terminal=True) if "\x1b[1;31mreplica" in line]
    assert len(red) == 1 and "replica-1" in red[0], "it does not serve"
    assert "not ready: replica-1 (restarting)" in [line.strip() for line in shown]
    healthy = msgspec.structs.replace(FLEET, states=dict.fromkeys(FLEET.states, "ready"))
    assert "not ready" not in "".join(lines(width, frame=healthy))


def test_wide_ones_have_whole_ids_and_narrow_ones_their_ends():
    assert ID in "\n".join(lines(200)) and "cached" in lines(200)[-11]
    narrow = lines(80)[-10:]
    assert ID not in "\n".join(narrow) and all(line.endswith("37b2926f-0") for line in narrow[::2])


def test_a_narrow_frame_has_the_whole_cause_on_two_lines():
    first, second = lines(80)[-2:]
    said = f"{first.removesuffix('37b2926f-0').split('81,300')[1]} {second}"
    assert said.split() == ["decode", "97", "%,", "beside", "573", "prompt", "tokens", "of", "37b2926f-0"]


def test_there_is_no_color_where_none_is_wanted(monkeypatch):
    assert "\x1b" not in "".join(lines(80))
    assert "\x1b[32m" in "".join(lines(80, force_terminal=True))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in "".join(lines(80, force_terminal=True))


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ((), 10, ""),
        ((0.0, 0.0), 10, "▁▁"),
        ((0.0, 7.0), 10, "▁█"),
        ((0.001, 3.5, 7.0), 10, "▂▅█"),
        ((7.0, 1.0, 2.0), 2, "▅█"),
    ],
)
def test_a_sparkline_shows_zero_lowest_and_its_maximum_highest(values, width, expected):
    assert sparkline(values, width) == expected


@pytest.mark.parametrize(
    ("parts", "expected"),
    [((0.5, 0.25), "██▒·"), ((0.0, 0.0), "····"), ((0.001, 0.999), "█▒▒▒"), ((1.0, 0.0), "████"), ((0.7, 0.9), "███▒")],
)
def test_a_bar_has_a_cell_for_every_share_that_is_not_nothing(parts, expected):
    assert bar(tuple(zip("█▒", parts, strict=True)), 4) == expected
