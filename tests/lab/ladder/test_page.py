"""The report: everything escaped, nothing loaded, the same figures as the record."""

import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console
from tests.lab.ladder.recorded import NOISE, RUNGS, a_ladder, a_run

from engine_lab.ladder.analysis import summarise_ladder
from engine_lab.ladder.figures import FIGURES
from engine_lab.ladder.page import page
from engine_lab.ladder.plots import chained
from engine_lab.ladder.record import Measured
from engine_lab.ladder.rungs import Rung
from engine_lab.ladder.screen import render
from engine_lab.ladder.wording import beside_study, conclusions
from engine_lab.shared.markup import Markup, tag

VOID = {"meta"}


class Elements(HTMLParser):
    """Which elements there are; raises where they do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.names, self.attributes = [], [], []

    def handle_starttag(self, name, attributes):
        self.names.append(name)
        self.attributes += [key for key, _ in attributes]
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name


@pytest.fixture
def ladder():
    return a_ladder([0.5, 1.0, 1.5, 1.0], num_same=2)


@pytest.fixture
def text(ladder):
    return page(ladder)


def test_text_is_escaped_and_markup_is_not():
    assert tag("p", "a < b", Markup("<b>c</b>"), title='"x"') == '<p title="&quot;x&quot;">a &lt; b<b>c</b></p>'
    assert tag("td", "x", class_="y", stroke_width=2, id=None) == '<td class="y" stroke-width="2">x</td>'


def test_the_page_is_well_formed_and_has_its_plots(text):
    elements = Elements()
    elements.feed(text)
    assert elements.open == [] and elements.names.count("svg") == 3
    assert "&lt;quantizer&gt;" in text and "<quantizer>" not in text and "a &lt;b&gt; &amp; c" in text


def test_the_page_loads_nothing_and_runs_nothing(text):
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1]
    css = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    assert "default-src 'none'" in policy and f"'sha256-{digest}'" in policy and "unsafe" not in policy
    elements = Elements()
    elements.feed(text)
    assert not {"src", "href", "style", "onclick"} & {*elements.attributes} and "url(" not in css
    assert re.findall(r"<script[^>]*>", text) == ['<script type="application/json" id="data">']


def test_the_data_in_the_page_are_those_of_the_file(ladder, text):
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])
    assert data["summary"]["rows"] == json.loads(json.dumps(ladder.summary["rows"]))
    assert len(data["comparisons"][0]["pairs"]) == 10 and data["model"] == "a <b> & c"


def test_the_conclusions_come_first(ladder, text):
    said = conclusions(ladder)
    assert [line.partition(":")[0] for line in said] == ["TTFT P50", "ITL", "E2E P50"]
    assert re.fullmatch(
        r"E2E P50: all rungs 1\.5\d \[.+\] of the baseline, worse; better with streaming \(0\.50\)", said[2]
    )
    assert text.index("of the baseline, worse") < text.index("From rung to rung")
    hindered = a_ladder([0.5, 0.8, 0.4, 1.2], rungs=[RUNGS[0], RUNGS[1]])
    assert "better with streaming (0.50), <quantizer> (0.80)" in conclusions(hindered)[0]
    assert "beside all others only worse with streaming (1.20)" in conclusions(hindered)[0]


def test_a_rung_that_undoes_an_earlier_one_says_so():
    rungs = [Rung("eight bits", ("quantizer=int8",)), Rung("four bits", ("quantizer=int4",))]
    ladder = a_ladder([0.5, 0.8, 0.4, 1.2], rungs=rungs)
    replaced = [row["replaces"] for row in ladder.summary["rows"]]
    assert replaced[:3] == [[], ["quantizer=int8"], []]
    assert "instead of <code>quantizer=int8</code>" in page(ladder)


@pytest.mark.parametrize(
    ("expected", "is_ratio", "said"),
    [(0.8, True, "as expected"), (0.95, True, "gains more"), (0.5, True, "gains less"), (0.5, False, "gains more")],
)
def test_a_change_is_put_beside_what_the_case_study_expects(expected, is_ratio, said):
    assert beside_study({"low": 0.7, "high": 0.9, "estimate": 0.8, "expected": expected}, is_ratio) == said
    assert beside_study({"low": None, "expected": expected}, is_ratio) == "unfinished"


def test_every_row_says_what_the_case_study_expects_and_what_was_measured(text):
    assert "the case study expects" in text
    assert "1.00 [0.9" in text  # ITL of streaming all by itself
    assert re.search(r"among 30 intervals|among 20 intervals", text)


def test_an_unfinished_ladder_and_a_refused_rung_are_said(ladder):
    found = a_ladder([0.5, 1.0, 1.5, 1.0], count=3)
    found.surveys[1].refused = "line\nquantizer=nonsense: no such option"
    found.comparisons[2] = Measured("all", "all rungs", (), (), refused="does not\nfit together")
    found.summary = summarise_ladder(found)
    for shown in (page(found), on_screen(found, 100)):
        flat = " ".join(shown.split())
        assert "3 of 10 pairs; no verdict" in flat
        assert "no such option" in flat and "fit together" in flat


def on_screen(ladder, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(ladder))
    return console.export_text()


def test_the_table_fits_a_terminal_of_80_columns(ladder):
    for a, b in (pair for measured in ladder.comparisons for pair in measured.pairs):
        a.figures["goodput"] = b.figures["goodput"] = 0.5
    ladder.summary = summarise_ladder(ladder)
    shown = on_screen(ladder, 80)
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    assert "with all rungs / without this one" in shown and "A/A: 2 of 2" in shown


def test_a_ladder_whose_figures_are_all_missing_has_a_page():
    ladder = a_ladder([1.0, 1.0, 1.0, 1.0], count=1)
    nothing = a_run(1.0)
    nothing.figures.update(dict.fromkeys(nothing.figures))
    for measured in ladder.comparisons:
        measured.pairs = [(nothing, nothing)]
    ladder.summary = summarise_ladder(ladder)
    assert "<h1>" in page(ladder) and on_screen(ladder, 80)


def test_bars_agree_with_the_ratios_whatever_other_comparisons_measured():
    ladder = a_ladder([0.5, 1.8, 0.9, 1.0])
    slow = [(a_run(0.1), a_run(0.18 * noise)) for noise in NOISE]
    ladder.comparisons[1].pairs = slow  # measured while the machine was ten times as quick
    ladder.floor = None
    ladder.summary = summarise_ladder(ladder)
    rows = [row for row in ladder.summary["rows"] if row["kind"] == "added"]
    baseline, first, second = chained(FIGURES[0], rows)
    assert (baseline, first, second) == pytest.approx((10.0, 5.0, 9.0), rel=0.02)
    assert "floor for one request" not in page(ladder)
    rows[0]["figures"].pop(FIGURES[0].key)
    assert chained(FIGURES[0], rows)[0] is None and chained(FIGURES[0], rows)[1] == pytest.approx(1.0)
