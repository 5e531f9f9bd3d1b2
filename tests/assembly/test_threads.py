"""``threads`` follows ``OMP_NUM_THREADS`` or says why not, and says where cores do not suffice."""

import os
from dataclasses import replace

import pytest

from engine.assembly.assemble import assemble
from engine.assembly.threads import cores_of, with_threads

CORES = 4


@pytest.fixture(scope="module")
def plans():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)))
        ranks = ("communicator=gloo", "exporter=[]")
        yield {size: assemble(["device=cpu", *ranks, f"parallelism.tp={size}"]) for size in (1, 2, 8)}


def resolved(plan, threads=None, **environment):
    """The number of threads of a rank, and the note."""
    given = replace(plan, settings=replace(plan.settings, threads=threads))
    found = with_threads(given, environment)
    assert found.notes[: len(plan.notes)] == plan.notes
    return found.settings.threads, "".join(found.notes[len(plan.notes) :])


def test_threads_follow_the_environment_where_they_are_not_set(plans):
    assert resolved(plans[1]) == (None, "") and cores_of(plans[1]) == CORES and cores_of(plans[2]) == CORES // 2
    follows = (2, "threads=2, as OMP_NUM_THREADS says; threads=N takes another number")
    assert resolved(plans[1], OMP_NUM_THREADS="2") == resolved(plans[1], OMP_NUM_THREADS=" 2,1") == follows


@pytest.mark.parametrize(
    ("environment", "threads", "why"),
    [
        ({"OMP_NUM_THREADS": "2"}, 3, "OMP_NUM_THREADS=2 is not followed: threads=3 says otherwise"),
        ({"OMP_NUM_THREADS": "2"}, 2, ""),
        ({"OMP_NUM_THREADS": ""}, None, ""),
        ({"OMP_NUM_THREADS": "many"}, None, "OMP_NUM_THREADS=many is not followed: expected a whole number from 1"),
        ({"OMP_NUM_THREADS": "0"}, None, "OMP_NUM_THREADS=0 is not followed: expected a whole number from 1"),
        (
            {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"},
            None,
            "OMP_NUM_THREADS=1 is not followed: torchrun sets it where nobody has; threads=1 does the same",
        ),
    ],
)
def test_what_is_not_followed_is_said_with_the_reason(environment, threads, why, plans):
    assert resolved(plans[1], threads, **environment) == (threads, why)


@pytest.mark.parametrize(
    ("ranks", "threads", "note"),
    [
        (1, CORES, ""),
        (2, 2, ""),
        (1, 5, "threads=5 on 4 cores: threads wait for cores, and all for the last; at most threads=4 would not"),
        (
            2,
            3,
            "2 ranks with threads=3 each on 4 cores: threads wait for cores, and all for the last; at most threads=",
        ),
        (
            8,
            None,
            "8 ranks with threads=1 each on 4 cores: threads wait for cores, and all for the last; at most 4 rank",
        ),
    ],
)
def test_more_threads_or_ranks_than_cores_are_a_note(ranks, threads, note, plans, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(CORES)))
    said = resolved(plans[ranks], threads)[1]
    assert said.startswith(note) and bool(said) == bool(note)


def test_a_plan_is_assembled_with_the_threads_of_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert assemble(["device=cpu"]).settings.threads == 1
