"""Steps one after the other: what fails, what goes on, and what drafters may not do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.contracts.drafter import DraftRows, DraftTokens, TargetStep
from engine.contracts.request import SamplingParams
from engine.drafting.graphs import DraftGraphs
from engine.drafting.runner import Drafts
from engine.step.graphs import Bucket, StepGraphs
from engine.step.plan import Admit, BlockCopy, DrafterBroken, RecordMove, StepPlan, StepRow, StepSkipped
from engine.step.runner import DeviceQueue, DeviceWorker, ModelRunner
from engine.step.tables import DeviceTables
from tests.exact_model import ExactKV, ExactModel, expected_output

from ..laws.harness import run_again
from .toy import BLOCK, MAX_DRAFTS, VOCAB, all_of, blocks_of, decode, make_capture, make_runner, prompt_plan, run

GREEDY = SamplingParams(temperature=0.0)


# Failures -----------------------------------------------------------------------------------------------------------


def exact_runner(buckets: tuple[Bucket, ...]) -> tuple[ModelRunner, ExactModel]:
    """Of a model that notices any key or value that is not the row's own."""
    model, kv = ExactModel(VOCAB), ExactKV(64, BLOCK)
    tables = DeviceTables(2, 48, MAX_DRAFTS, BLOCK, "cpu", VOCAB)
    runner = ModelRunner(model, kv, tables)  # type: ignore[arg-type]
    if buckets:
        runner.graphs = StepGraphs(model, kv, tables, (), buckets, run_again)  # type: ignore[arg-type]
        runner.graphs.capture()
    return runner, model


@pytest.mark.parametrize("buckets", [(), (Bucket(2, 1), Bucket(2, 4))], ids=["uncaptured", "captured"])
def test_a_row_that_is_rolled_back_goes_on_in_place_from_what_is_confirmed(buckets: tuple[Bucket, ...]) -> None:
    runner, model = exact_runner(buckets)
    queue = DeviceQueue(runner, DeviceWorker(False))
    prompt, stays = (5, 6, 7, 8, 9, 1), (3, 2, 4)
    want, beside = expected_output(prompt, 12, VOCAB), expected_output(stays, 12, VOCAB)
    first = queue.launch(prompt_plan({1: prompt, 0: stays}))()
    assert [row.tokens for row in first.rows] == [(want[0],), (beside[0],)]

    # A step goes well, with all its drafts accepted, and is not confirmed: the one before its result was taken fails.
    drafts = tuple(want[1:4])
    assert queue.launch(StepPlan(1, (), (decode(1, 6, drafts),)))().rows[0].num_accepted == 3
    model.fail_on_token = want[4]
    failing = queue.launch(StepPlan(2, (), (decode(1, 10),)))
    after = queue.launch(StepPlan(3, (), (decode(1, 11),)))
    with pytest.raises(RuntimeError, match=f"token {want[4]} in the batch"):
        failing()
    with pytest.raises(StepSkipped, match="planned on top of a failed one"):
        after()
    queue.resume()
    model.fail_on_token = None

    again = Admit(1, (*prompt, want[0]), len(prompt), len(prompt), GREEDY, 0, ())
    found, wrong = [want[0]], (want[1], (want[2] + 1) % VOCAB)
    rows = (decode(1, 6, wrong, new_blocks=all_of(1)), decode(0, 3))
    moved, kept = queue.launch(StepPlan(4, (again,), rows))().rows
    assert (moved.num_accepted, kept.tokens) == (1, (beside[1],))
    found += moved.tokens
    while len(found) < 9:
        found += queue.launch(StepPlan(4 + len(found), (), (decode(1, 5 + len(found)),)))().rows[0].tokens
    assert found == want[:9]
    assert runner.tables.computed.tolist() == [4, 5 + 9, 0]


# Copies of blocks -----------------------------------------------------------------------------------------------------

PROMPT = (5, 6, 7, 8)
"""A block full."""
FIRST_BLOCK = (BlockCopy(0, blocks_of(1)[0], blocks_of(0)[0]),)
"""Of row 1, for row 0."""


def test_blocks_are_copied_before_anything_of_the_same_step_is_written_to_them() -> None:
    runner, _ = exact_runner(())
    queue = DeviceQueue(runner, DeviceWorker(False))
    queue.launch(prompt_plan({1: PROMPT}))()
    # The block is somebody else's by now, who writes to it in the step that copies it.
    thief = Admit(1, (2, 2, 2), 0, 3, GREEDY, 0, ())
    again = Admit(0, PROMPT, BLOCK - 1, BLOCK, GREEDY, 0, (), FIRST_BLOCK)
    rows = (StepRow(1, 0, 3, new_blocks=all_of(1)), StepRow(0, BLOCK - 1, 1, new_blocks=all_of(0)))
    other, found = queue.launch(StepPlan(1, (thief, again), rows))().rows
    assert found.tokens == tuple(expected_output(PROMPT, 1, VOCAB))
    assert other.tokens == tuple(expected_output((2, 2, 2), 1, VOCAB))


class OneRecord:
    """The record of a block of other tokens."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def scatter(self, group: int, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self.runner.kv.tokens[list(blocks)] = 9  # type: ignore[attr-defined]


def test_blocks_are_copied_before_records_of_the_same_step_are_loaded_into_them() -> None:
    runner, _ = exact_runner(())
    runner.records = OneRecord(runner)  # type: ignore[assignment]
    queue = DeviceQueue(runner, DeviceWorker(False))
    queue.launch(prompt_plan({1: PROMPT}))()
    loaded = (9,) * BLOCK + (2,)
    admits = (
        Admit(0, PROMPT, BLOCK - 1, BLOCK, GREEDY, 0, (), FIRST_BLOCK),
        Admit(1, loaded, BLOCK, BLOCK + 1, GREEDY, 0, ()),
    )
    rows = (StepRow(0, BLOCK - 1, 1, new_blocks=all_of(0)), StepRow(1, BLOCK, 1, new_blocks=all_of(1)))
    loads = (RecordMove(0, blocks_of(1)[:1], (0,)),)
    found, other = queue.launch(StepPlan(1, admits, rows, loads=loads))().rows
    assert found.tokens == tuple(expected_output(PROMPT, 1, VOCAB))
    assert other.tokens == tuple(expected_output(loaded, 1, VOCAB))


def test_copies_of_a_step_that_is_skipped_are_made_all_the_same() -> None:
    """What they were made from may be gone when its rows are admitted again."""
    runner, model = exact_runner(())
    queue = DeviceQueue(runner, DeviceWorker(False))
    queue.launch(prompt_plan({1: PROMPT}))()
    model.fail_on_token = 3
    failing = queue.launch(StepPlan(1, (Admit(1, (3,), 0, 1, GREEDY, 0, ()),), (StepRow(1, 0, 1),)))
    again = Admit(0, PROMPT, BLOCK - 1, BLOCK, GREEDY, 0, (), FIRST_BLOCK)
    row = StepRow(0, BLOCK - 1, 1, new_blocks=all_of(0))
    skipped = queue.launch(StepPlan(2, (again,), (row,)))
    for wait, error in ((failing, RuntimeError), (skipped, StepSkipped)):
        with pytest.raises(error):
            wait()
    queue.resume()
    runner.kv.tokens[blocks_of(1)[0]] = -1  # type: ignore[attr-defined]
    retried = Admit(0, PROMPT, BLOCK - 1, BLOCK, GREEDY, 0, ())
    assert queue.launch(StepPlan(3, (retried,), (row,)))().rows[0].tokens == tuple(expected_output(PROMPT, 1, VOCAB))


# Drafters -----------------------------------------------------------------------------------------------------------


class Says:
    """Proposes what it is told to say."""

    placement, max_width, aux_layers, kv, kv_lookahead, weights_bytes = "device", MAX_DRAFTS, (), None, 0, 0
    capturable = True

    def __init__(self) -> None:
        self.says = torch.ones(2, MAX_DRAFTS, dtype=torch.int64)

    def start(self, engine: object) -> None: ...

    def extend(self, step: TargetStep) -> None: ...

    def propose(self, rows: DraftRows) -> DraftTokens:
        return DraftTokens(self.says[: len(rows.index)])

    def release(self, row_id: int) -> None: ...


def drafting_runner(captured: bool) -> tuple[ModelRunner, Says]:
    capture, drafter = make_capture(), Says()
    runner = make_runner(*((Bucket(2, 1), Bucket(2, 3)) if captured else ()), capture=capture)
    drafts = Drafts(drafter, runner.tables)  # type: ignore[arg-type]
    runner.drafts = drafts
    if runner.graphs is not None:
        drafts.graphs = DraftGraphs(drafter, runner.graphs, capture)  # type: ignore[arg-type]
        drafts.graphs.capture()
    return runner, drafter


@pytest.mark.parametrize("token", [-1, VOCAB])
@pytest.mark.parametrize("captured", [True, False])
def test_drafts_outside_of_the_vocabulary_are_reported_and_never_embedded(token: int, captured: bool) -> None:
    runner, drafter = drafting_runner(captured)
    run(runner, prompt_plan({0: (1, 2, 3), 1: (4, 5, 6)}))
    plan = StepPlan(1, (), tuple(decode(row_id, 3, wants_drafts=2) for row_id in (0, 1)))
    drafter.says[1, 1] = token
    step = runner.launch(plan)
    # The next step is launched before the result of this one is known.
    drafter.says.fill_(2)
    rows = tuple(StepRow(row_id, 4, 1, num_drafts=2, wants_drafts=2) for row_id in (0, 1))
    after = runner.launch(StepPlan(2, (), rows))
    with pytest.raises(DrafterBroken, match="token ids outside of the vocabulary"):
        step.result()
    assert all(row.tokens and not row.error for row in after.result().rows)


def test_a_drafter_that_proposes_too_few_tokens_is_reported() -> None:
    """The tables would keep what nobody drafted."""
    runner, drafter = drafting_runner(captured=False)
    drafter.says = drafter.says[:, :1]
    plan = prompt_plan({0: (1, 2, 3)})
    plan = StepPlan(0, plan.admits, (StepRow(0, 0, 3, new_blocks=all_of(0), wants_drafts=2),))
    runner.tables.apply(plan)
    with pytest.raises(DrafterBroken, match=r"proposed tokens \[1, 1\], expected 1 rows of at least 2"):
        runner.launch(plan)
