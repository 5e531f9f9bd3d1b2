"""The report of a ladder: one page that needs neither network nor scripts."""

from __future__ import annotations

from typing import Any

from engine_lab.ladder.analysis import BETTER, UNDECIDED, WORSE
from engine_lab.ladder.comparisons import ADDED, ALL, LEFT_OUT
from engine_lab.ladder.figures import FIGURES
from engine_lab.ladder.plots import forest, shown_ms, steps
from engine_lab.ladder.record import Ladder
from engine_lab.ladder.wording import LABELS, beside_study, conclusions, interval, notes, outputs
from engine_lab.shared.document import document
from engine_lab.shared.markup import Markup, joined, table, tag

COLORS = {BETTER: "better", WORSE: "worse", UNDECIDED: "undecided"}
MIB = 2.0**20


def page(ladder: Ladder) -> str:
    """The whole page. Its data, all runs included, is in it as JSON."""
    return document(f"Latency ladder of {ladder.model}", sections(ladder), ladder)


def sections(ladder: Ladder) -> list[Markup]:
    rows = [row for row in ladder.summary["rows"] if not row["refused"] and row["figures"]]
    added = [row for row in rows if row["kind"] == ADDED]
    whole = [row for row in rows if row["kind"] == ALL]
    left_out = [row for row in rows if row["kind"] == LEFT_OUT]
    parts = [
        tag("h1", f"Latency ladder of {ladder.model}"),
        tag("p", "Baseline: ", tag("code", " ".join(ladder.base)), class_="lead"),
        tag("ul", *(tag("li", line) for line in conclusions(ladder))),
        tag("ul", *(tag("li", line) for line in notes(ladder)), class_="notes"),
    ]
    if added:
        parts += [
            tag("h2", "From rung to rung"),
            _figure(
                steps(added, ("output_p50", "ttft_p50", "itl", "e2e_p50"), "From rung to rung"), steps_caption(added)
            ),
            tag("h2", "What each rung changed when it was added"),
            _figure(forest([*added, *whole], "Ratios of added rungs"), FOREST_CAPTION),
            ratios([*added, *whole]),
        ]
    if left_out:
        parts += [
            tag("h2", "What each rung changes when all others are there"),
            _figure(forest(left_out, "Ratios of rungs left out"), "With all rungs / without this one."),
            ratios(left_out),
        ]
    return [*parts, *_engines(added), *_study(rows), *_same(ladder), *_definitions(ladder)]


def steps_caption(rows: list[dict[str, Any]]) -> str:
    told = "The baseline's median, times the ratio of each rung up to there."
    if any(row["floors"] for row in rows):
        told += " The vertical mark is the machine's floor for one request at a time without drafts."
    return told


FOREST_CAPTION = (
    "With the rung / without it: left of the dashed line is faster; of goodput, right is better. Green and red: the "
    "interval leaves out no change; grey: no winner. A diamond is what the case study expects."
)


def _figure(picture: Markup, caption: str) -> Markup:
    return tag("figure", picture, tag("figcaption", caption))


def ratios(rows: list[dict[str, Any]]) -> Markup:
    """Medians, estimates and intervals in figures."""
    shown = [figure for figure in FIGURES if any(figure.key in row["figures"] for row in rows)]
    body = [[joined(row["name"], *_changes(row)), *(_cell(row, f.key) for f in shown)] for row in rows]
    return table(["rung", *(figure.label for figure in shown)], body)


def _changes(row: dict[str, Any]) -> list[Markup]:
    told = [tag("small", tag("code", " ".join(row["changes"])))]
    if row["replaces"]:
        told.append(tag("small", "instead of ", tag("code", " ".join(row["replaces"]))))
    return told


def _cell(row: dict[str, Any], key: str) -> Markup:
    found = row["figures"].get(key)
    if found is None:
        return Markup("-")
    change = f"{shown_ms(found['before'])} to {shown_ms(found['after'])}"
    estimate = tag("span", interval(found), class_="estimate")
    return tag("span", estimate, tag("small", f"{change}, {found['verdict']}"), class_=COLORS.get(found["verdict"]))


def _engines(rows: list[dict[str, Any]]) -> list[Markup]:
    """What each rung's engine takes and keeps, and whether its answers are the same."""
    head = [
        "rung",
        "greedy outputs",
        "answer (tokens)",
        "cached",
        "drafts accepted",
        "weights (MiB)",
        "KV cache (MiB)",
        "KV tokens",
    ]
    head += ["resident (MiB)", "requests it keeps", "sharing the prefix"]
    body = []
    for row in rows:
        facts, users = row["facts"], row["users"] or {}
        sizes = [_number(facts.get(key), MIB) for key in ("weights_bytes", "kv_bytes")]
        sizes += [_number(facts.get("kv_tokens")), _number(facts.get("resident_bytes"), MIB)]
        shares = [_number(row["answer_tokens"][1]), _share(row["cached"]), _share(row["acceptance"])]
        kept = [_number(users.get("apart")), _number(users.get("sharing"))]
        body.append([row["name"], outputs(row["outputs"]), *shares, *sizes, *kept])
    return [tag("h2", "What the engine takes, keeps and answers"), table(head, body)] if body else []


def _study(rows: list[dict[str, Any]]) -> list[Markup]:
    """Where the case study says something."""
    body = []
    for row in rows:
        for figure in FIGURES:
            found = row["figures"].get(figure.key)
            if row["kind"] != LEFT_OUT and found is not None and found["expected"] is not None:
                said = beside_study(found, figure.is_ratio)
                here = tag("span", interval(found), class_="estimate")
                body.append([row["name"], figure.label, f"{found['expected']:.2f}", here, said])
    remarks = [tag("li", f"{row['name']}: {note}") for row in rows if row["kind"] != LEFT_OUT for note in row["notes"]]
    if not body:
        return []
    return [
        tag("h2", "Beside the case study"),
        tag(
            "p",
            "It is of Llama 3.1-70B in bfloat16 on two A100-80GB. As expected: inside of the interval here.",
        ),
        table(["rung", "figure", "the case study expects", "here", ""], body),
        tag("ul", *remarks, class_="notes"),
    ]


def _same(ladder: Ladder) -> list[Markup]:
    same = ladder.summary["same"]
    if same is None:
        return []
    body = [
        [LABELS[key], f"{one['named']} of {one['of']}", f"{one['low']:.1%}-{one['high']:.1%}"]
        for key, one in same["by_figure"].items()
    ]
    named = f"{same['without_any_winner']} of {same['comparisons']} comparisons named no winner in any figure."
    return [
        tag("h2", "Equal engines beside each other"),
        tag("p", named),
        table(["figure", "named a winner", "share [95 % interval]"], body),
    ]


def _definitions(ladder: Ladder) -> list[Markup]:
    terms = [joined(tag("dt", figure.label), tag("dd", figure.definition)) for figure in FIGURES]
    return [tag("h2", "Figures"), tag("dl", *terms)]


def _number(value: float | None, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
