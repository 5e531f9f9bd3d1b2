"""The cost model of parallelism: what it was fitted to, how well, and the tables it prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from engine.models.layout import Layout
from engine.models.placement import place
from engine.models.work import Step, Widths, held_bytes, work_of
from engine_lab.shared.estimates.efficiency import SERVING as OF_SERVING
from engine_lab.shared.estimates.errors import EstimateError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.parallel_model import printed, tables
from tools.parallel_model.__main__ import main
from tools.parallel_model.anchors import COMPILED, SERVING, anchors
from tools.parallel_model.fitting import bounded, estimated_ms, fit
from tools.parallel_model.models import graph

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "parallelism.md").read_text("utf-8")


def of(stack):
    return [anchor for anchor in anchors() if anchor.stack == stack]


@pytest.mark.parametrize(
    ("model", "held", "read"),
    [("Llama-3.1-8B", 16.06, 15.01), ("Llama-3.1-70B", 141.1, 139.0), ("Qwen3-30B-A3B", 61.1, 6.1)],
)
def test_weights_of_published_shapes_are_those_of_the_models(model, held, read):
    whole = graph(model)
    assert held_bytes(whole, Widths()) / 1e9 == pytest.approx(held, rel=0.002)
    (rank,) = place(whole, Layout(), lambda spec, axis: 1)
    assert work_of(rank, Step(1), Widths()).num_bytes / 1e9 == pytest.approx(read, rel=0.005)


def test_least_squares_find_what_the_numbers_were_made_of():
    rows = [[1.0, 2.0, 0.5], [0.3, 1.0, 2.0], [2.0, 0.1, 1.0], [1.0, 1.0, 1.0], [0.2, 3.0, 0.4]]
    wanted = [1.5, 0.25, 4.0]
    rests = [sum(a * b for a, b in zip(row, wanted, strict=True)) for row in rows]
    assert bounded(rows, rests, [1.0, 0.0, 0.0]) == pytest.approx(wanted)


def test_least_squares_keep_to_bounds():
    rows = [[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]
    falling = [3.0, 2.0, 1.0]
    assert bounded(rows, falling, [1.0, 0.0]) == pytest.approx([2.0, 0.0])


def test_too_few_figures_are_refused():
    with pytest.raises(ValueError, match="2 figures, expected at least as many"):
        bounded([[1.0, 2.0, 3.0]] * 2, [1.0, 1.0], [0.0] * 3)


def test_the_core_has_what_the_fit_finds():
    found = fit(of(SERVING))
    assert OF_SERVING.bandwidth == pytest.approx(found.bandwidth, abs=0.005)
    assert OF_SERVING.layer_us == pytest.approx(found.layer_us, abs=0.5)
    assert OF_SERVING.mixture_us == pytest.approx(found.mixture_us, abs=0.5)
    assert str(sum(not anchor.left_out for anchor in of(SERVING))) in OF_SERVING.source


def test_residuals_are_what_the_page_says():
    for stack, typical, largest in ((COMPILED, 0.04, 0.09), (SERVING, 0.12, 0.27)):
        mine = of(stack)
        found = fit(mine)
        errors = [estimated_ms(anchor, found) / anchor.ms - 1 for anchor in mine if not anchor.left_out]
        assert tables.spread(mine, found) < typical and max(map(abs, errors)) < largest, stack


def test_what_is_left_out_says_why_and_is_shown():
    rows = [row for row in tables.fit_table() if row.startswith("| ")]
    shown = [row for row in rows if "| no: " in row]
    assert len(shown) == sum(bool(anchor.left_out) for anchor in anchors()) > 0
    assert all(row in PAGE for row in rows), "docs/parallelism.md: print it again with --fit"


def test_tables_are_labelled_and_those_of_the_page(capsys):
    main(["--models", "Llama-3.1-8B"])
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) > 8 and all(line.endswith("| estimated |") for line in table[2:])
    assert all(line in PAGE for line in lines), "docs/parallelism.md: print it again"


def test_a_device_and_figures_of_ones_own_are_read_from_files(tmp_path, capsys):
    (tmp_path / "cpu.json").write_text(json.dumps(
        {"name": "half a CPU", "memory": 64 * 2**30, "bandwidth": 20e9, "flops": 1e12, "link": 10e9, "source": "a test"}
    ))  # fmt: skip
    figure = {"method": "shm", "ranks": 2, "num_bytes": 8192, "us": 9, "device": "CPU", "source": "a test",
              "label": "measured"}  # fmt: skip
    (tmp_path / "figures.json").write_text(json.dumps([figure]))
    (tmp_path / "efficiency.json").write_text(json.dumps({"bandwidth": 0.9, "layer_us": 20}))
    main(["--models", "Llama-3.2-1B", "--devices", str(tmp_path / "cpu.json"), "--method", "shm",
          "--figures", str(tmp_path / "figures.json"), "--efficiency", str(tmp_path / "efficiency.json")])  # fmt: skip
    shown = capsys.readouterr().out
    assert "half a CPU" in shown and "shm, measured: 17, 21, 23 us" in shown and "| tp 2 |" in shown


MEASURED = """2 cores; one core copies 5.0 GB/s

2 ranks, us: median (95th percentile)

| bytes | shm | gloo | one copy |
|---|---|---|---|
| 8 B | 2.1 (3.0) | 50.0 (80.1) | 0.00 |
| 4 KiB | 4.5 (5.0) | 55.0 (90.0) | 0.82 |

4 ranks, us: median (95th percentile)

| bytes | shm | gloo | one copy |
|---|---|---|---|
| 4 MiB | 900.0 (1000.0) | 5000.5 (6000.0) | 838.86 |
"""


def test_what_is_measured_here_is_read_as_it_is_printed():
    found = printed.figures(MEASURED, "a test")
    assert [(one.method, one.ranks, one.num_bytes, one.us) for one in found] == [
        ("shm", 2, 8, 2.1), ("gloo", 2, 8, 50.0), ("shm", 2, 4096, 4.5), ("gloo", 2, 4096, 55.0),
        ("shm", 4, 4 << 20, 900.0), ("gloo", 4, 4 << 20, 5000.5),
    ]  # fmt: skip
    assert {(one.device, one.label) for one in found} == {("2 cores", "measured")}


def test_another_text_is_no_table_of_figures():
    with pytest.raises(EstimateError, match=r"notes\.md: no table of all-reduces, expected what tools/benchmarks/coll"):
        printed.figures("| bytes | shm |", "notes.md")


def test_layouts_that_do_not_fit_or_cannot_be_are_shown_as_such(monkeypatch, capsys):
    monkeypatch.setattr(tables, "LAYOUTS", (Layout(), Layout(tp=96)))
    main(["--models", "Llama-3.1-70B", "--devices", "H100"])
    shown = capsys.readouterr().out
    assert "| one card | 141.1 | - | - | - | - | - | estimated |" in shown
    assert "| tp 96 | refused: parallelism.tp=96: " in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "B9000"], "device 'B9000' is unknown (did you mean B200?): expected one of"),
        (["--method", "carrier"], "all-reduce 'carrier': no figures of it"),
        (["--figures", "/nowhere.json"], "/nowhere.json"),
        (["--prompt", "0"], "--prompt 0: expected at least 0 and at least 1 token"),
    ],
)
def test_wrong_arguments_end_in_one_line(arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["--models", "Llama-3.2-1B", *arguments])
    assert message in str(ended.value)
