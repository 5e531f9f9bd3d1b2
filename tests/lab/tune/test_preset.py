"""A plugin set as a file, and the lines in which it differs."""

from __future__ import annotations

import pytest

from engine.assembly.assemble import configure
from engine_lab.sweep.record import Candidate, Experiment
from engine_lab.tune.command import COMMAND
from engine_lab.tune.lines import left_out, lines_of, tuned_sets
from engine_lab.tune.options import GRID, split
from engine_lab.tune.preset import write_preset


@pytest.mark.parametrize(
    "words",
    [
        ("+preset=latency", "device=cpu", "drafter=ngram", "drafter.max_width=2", "scheduler.token_budget=512"),
        ("exporter=[prometheus,trace]", "exporter.trace.path=x", "kv_store=[host]", "kv_store.host.max_bytes=2000000"),
        ("+preset=baseline", "exporter=[]", "execution=auto"),
        (),
    ],
    ids=("preset and values", "several plugins of a slot", "none of a slot", "defaults"),
)
def test_a_preset_composes_to_what_its_overrides_do(tmp_path, words):
    write_preset(tmp_path / "preset" / "mine.yaml", words, [], ["evidence", "more: of it"])
    assert (
        (tmp_path / "preset" / "mine.yaml").read_text().startswith("# @package _global_\n# evidence\n# more: of it\n")
    )
    assert configure(["+preset=mine"], [tmp_path]).composed.tree() == configure(words).composed.tree()


def test_lines_without_effect_are_left_out_and_every_other_one_is_tried_without():
    baseline = Candidate(0, "baseline", ("device=cpu",))
    lines = ("drafter=ngram", "quantizer=checkpoint", "scheduler.token_budget=512")
    chosen = Candidate(1, "chosen", (*baseline.words, *lines))
    found = lines_of(chosen, baseline, [])
    assert found == ("drafter=ngram", "scheduler.token_budget=512")
    experiment = Experiment((), {}, [baseline, chosen])
    assert [(one.id, one.name, one.words) for one in left_out(experiment, chosen, found, [])] == [
        (2, "without drafter=ngram", ("device=cpu", "scheduler.token_budget=512")),
        (3, "without scheduler.token_budget=512", ("device=cpu", "drafter=ngram")),
    ]
    assert left_out(experiment, chosen, found[:1], []) == []


def test_the_grid_is_of_the_words_with_several_values_or_of_the_keys_that_are_left_open():
    assert split(["device=cpu", "drafter=none,ngram"], []) == (["device=cpu"], ["drafter=none,ngram"])
    assert split(["device=cpu", "drafter=none"], []) == (["device=cpu", "drafter=none"], list(GRID[1:]))
    sets = tuned_sets(["device=cpu"], ["drafter=none,ngram"], [])
    assert [(one.name, one.same_as) for one in sets] == [
        ("baseline", None),
        ("drafter=none", 0),
        ("drafter=ngram", None),
    ]
    assert all(word in COMMAND.notes for word in GRID)
