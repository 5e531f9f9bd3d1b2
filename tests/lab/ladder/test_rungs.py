"""Rungs as written, and which sets of overrides a ladder compares."""

import pytest

from engine_lab.ladder.comparisons import ADDED, ALL, LEFT_OUT, SAME, Comparison, plan
from engine_lab.ladder.rungs import (
    BASELINE,
    DEFAULT_RUNGS,
    Form,
    Rung,
    baseline,
    check_names,
    form_of,
    merged,
    overrides_of,
    parse_rung,
    read_rungs,
)

A, B, C = (Rung(name, (f"{name}=1",)) for name in "abc")


def test_a_rung_may_change_the_engine_and_the_requests():
    rung = parse_rung(" static first : kv_allocator=prefix_cache workload.static_first=true")
    assert rung.name == "static first"
    assert overrides_of(rung.words) == ("kv_allocator=prefix_cache",)
    assert form_of(rung.words) == Form(static_first=True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("quantizer=int8", "expected NAME: OVERRIDE"),
        ("name:", "expected NAME: OVERRIDE"),
        ("name: no-override", "expected NAME: OVERRIDE"),
        ("name: workload.size=3", r"workload\.size: expected"),
        ("name: workload.stream=yes", "stream=yes: expected true or false"),
        ("name: workload.max_tokens=0", "max_tokens=0: expected a whole number"),
    ],
)
def test_a_bad_rung_is_refused_with_what_was_expected(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_rung(text)


def test_the_default_rungs_are_readable_and_differ():
    check_names([parse_rung(text) for text in DEFAULT_RUNGS])


def test_rungs_come_from_a_file_with_comments(tmp_path):
    file = tmp_path / "rungs"
    file.write_text("# ours\n\na: a=1\n  b: b=1\n")
    assert read_rungs(str(file)) == [A, B]
    with pytest.raises(ValueError, match="expected a file"):
        read_rungs(str(tmp_path / "missing"))


def test_no_rungs_and_two_of_one_name_are_refused():
    with pytest.raises(ValueError, match="no rungs"):
        check_names([])
    with pytest.raises(ValueError, match="'a' comes twice"):
        check_names([A, B, A])


def test_a_later_word_replaces_an_earlier_one_of_its_key():
    assert merged(("+preset=baseline", "drafter=none"), ("drafter=ngram", "x=1")) == (
        "+preset=baseline",
        "drafter=ngram",
        "x=1",
    )


def test_the_baseline_is_the_preset_of_that_name_unless_another_is_asked_for():
    assert baseline(["model=x"]) == (BASELINE, "model=x")
    assert baseline(["+preset=latency"]) == ("+preset=latency",)


def test_rungs_are_added_one_by_one_and_left_out_one_by_one():
    found = plan(("base=1",), [A, B, C], num_same=1)
    top = ("base=1", "a=1", "b=1", "c=1")
    assert found == [
        Comparison(ADDED, "a", ("base=1",), ("base=1", "a=1")),
        Comparison(ADDED, "b", ("base=1", "a=1"), ("base=1", "a=1", "b=1")),
        Comparison(ADDED, "c", ("base=1", "a=1", "b=1"), top),
        Comparison(ALL, "all rungs", ("base=1",), top),
        Comparison(LEFT_OUT, "a", ("base=1", "b=1", "c=1"), top),
        Comparison(LEFT_OUT, "b", ("base=1", "a=1", "c=1"), top),
        Comparison(SAME, "A/A 1", ("base=1",), ("base=1",)),
    ]


def test_one_rung_is_one_comparison():
    assert [comparison.kind for comparison in plan((), [A])] == [ADDED]
    assert [comparison.kind for comparison in plan((), [A, B], leave_one_out=False)] == [ADDED, ADDED, ALL]
