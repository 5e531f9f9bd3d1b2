"""Conformance suites for drafters: derive a test class, say how to make yours, and run pytest.

.. code-block:: python

    class TestMine(HostDrafterConformance):
        def make(self):
            return Mine(MineConfig(max_width=4), context)

Drafters on the device are tried in a whole engine, on the bundled model or one of yours:

.. code-block:: python

    class TestMine(DeviceDrafterConformance):
        overrides = ("drafter=mine",)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from engine import LLM
from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.assembly.negotiation import HOST_DRAFTER
from engine.contracts.drafter import DeviceDrafter, Draft, DraftRow, HostDrafter, may_be_captured, on_device
from engine.drafting.runner import Drafts
from engine.kv.cache import KVCache
from engine.kv.groups import cache_groups
from engine.plugin_guard.calls import lacking
from engine.startup.rank import capture_graphs, graph_buckets, load_plan, start_drafter
from engine.step.runner import ModelRunner
from engine.step.tables import DeviceTables
from engine.testing.no_sync import NoSync, as_on_a_gpu
from engine.testing.subject import Subject, Suite, filled


class HostDrafterConformance:
    """What the core relies on. Override the class attributes to fit what the drafter looks for."""

    vocab_size = 64
    history: tuple[int, ...] = (5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7)
    """A history the drafter should have something to say about."""

    def make(self) -> HostDrafter:
        """A fresh drafter."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def row(self, row_id: int, num_draft_tokens: int, history: Sequence[int] | None = None, salt: str = "") -> DraftRow:
        """A request with this history, of which the first half is its prompt."""
        tokens = list(self.history if history is None else history)
        return DraftRow(row_id, tokens, max(1, len(tokens) // 2), num_draft_tokens, salt)

    def ask(
        self,
        drafter: HostDrafter,
        row_ids: Sequence[int],
        num_draft_tokens: int,
        history: Sequence[int] | None = None,
        salt: str = "",
    ) -> Draft:
        """Proposals for ``row_ids``, each with the same history."""
        draft: object = drafter.propose([self.row(row_id, num_draft_tokens, history, salt) for row_id in row_ids])
        assert isinstance(draft, Draft), f"propose() returned {draft!r:.60}, expected a Draft"
        return draft

    def prefixes(self) -> list[tuple[int, ...]]:
        """Histories that end where the drafter's own has more to tell."""
        return [self.history[:length] for length in range(1, len(self.history) + 1)]

    def check(self, drafter: HostDrafter, draft: Draft, num_rows: int, num_draft_tokens: int) -> None:
        """A draft is well-formed: one tuple a row, no more tokens than wanted, ids in the vocabulary."""
        assert len(draft.tokens) == num_rows, "one proposal per row, in the order of the rows"
        for tokens in draft.tokens:
            assert isinstance(tokens, tuple), "proposals are tuples"
            assert len(tokens) <= min(num_draft_tokens, drafter.max_width), "no more tokens than wanted"
            assert all(type(t) is int and 0 <= t < self.vocab_size for t in tokens), "ids in the vocabulary"

    def test_declares_what_the_core_plans_with(self) -> None:
        drafter = self.make()
        assert isinstance(drafter, HostDrafter), lacking(drafter, HostDrafter)
        assert drafter.max_width >= 0
        assert drafter.placement == "host" or drafter.max_width == 0

    def test_never_proposes_more_than_wanted(self) -> None:
        for num_draft_tokens in range(1, self.make().max_width + 1):
            drafter = self.make()
            self.check(drafter, self.ask(drafter, [0], num_draft_tokens), 1, num_draft_tokens)

    def test_proposes_for_the_history_it_was_made_for(self) -> None:
        drafter = self.make()
        if drafter.max_width:
            assert self.ask(drafter, [0], drafter.max_width).tokens[0], "no draft: set `history` to what it knows"

    def test_histories_of_any_length_are_fine(self) -> None:
        """From a single token on; each in a row of its own, and one row that grows."""
        most = self.make().max_width
        if most:
            growing = self.make()
            for tokens in self.prefixes():
                self.check(drafter := self.make(), self.ask(drafter, [0], most, tokens), 1, most)
                self.check(growing, self.ask(growing, [0], most, tokens), 1, most)

    def test_rows_of_a_batch_do_not_influence_each_other(self) -> None:
        """Each gets what it would get alone, in the order of the rows, and no more than it wants."""
        most = self.make().max_width
        if not most:
            return
        drafter, alone = self.make(), self.ask(self.make(), [1], most).tokens[0]
        draft = self.ask(drafter, row_ids := [3, 1, 2], most)
        self.check(drafter, draft, len(row_ids), most)
        assert draft.tokens == (alone,) * len(row_ids)
        # Other rows are other tenants': of the same tenant's a drafter may use what it likes.
        tenants = [
            self.row(row_id, 1 + row_id % most, tokens, f"tenant {row_id}")
            for row_id, tokens in zip(range(len(self.history), 0, -1), self.prefixes())
        ]
        together = self.make().propose(tenants).tokens
        assert len(together) == len(tenants)
        for row, tokens in zip(tenants, together, strict=True):
            assert len(tokens) <= row.num_draft_tokens
            assert tokens == self.make().propose([row]).tokens[0], f"row {row.row_id} among others"

    def test_histories_are_left_alone(self) -> None:
        drafter, most = self.make(), max(1, self.make().max_width)
        rows = [self.row(row_id, most) for row_id in (0, 1)]
        drafter.propose(rows)
        assert [row.tokens for row in rows] == [list(self.history)] * 2

    def test_an_empty_batch_is_fine(self) -> None:
        drafter = self.make()
        assert self.ask(drafter, [], max(1, drafter.max_width)).tokens == ()

    def test_released_and_unknown_slots_can_be_released(self) -> None:
        drafter = self.make()
        self.ask(drafter, [0], max(1, drafter.max_width))
        drafter.release(0)
        drafter.release(0)
        drafter.release(7)

    def test_a_reused_row_knows_nothing_of_a_request_of_another_tenant(self) -> None:
        """Of the same tenant's requests a drafter may remember what it likes."""
        most = self.make().max_width
        if not most:
            return
        for other in (tuple(reversed(self.history)), *self.prefixes()):
            used, fresh = self.make(), self.make()
            self.ask(used, [0, 1], most, salt="one")
            used.release(0)
            expected = self.ask(fresh, [0], most, other, salt="other").tokens
            assert self.ask(used, [0], most, other, salt="other").tokens == expected, other

    def test_a_tenant_gets_nothing_of_another_tenants_text(self) -> None:
        """Whether the other's request runs or has ended: a table that all share shows one tenant's tokens to the
        other."""
        most = self.make().max_width
        if not most:
            return
        for others, mine in (("one", "other"), ("", "other"), ("one", "")):
            for tokens in self.prefixes():
                used, expected = self.make(), self.ask(self.make(), [5], most, tokens, salt=mine).tokens
                self.ask(used, [0, 1], most, salt=others)
                used.release(1)
                assert self.ask(used, [5], most, tokens, salt=mine).tokens == expected, (others, mine, tokens)


class DeviceDrafterConformance:
    """A drafter on the device, in a whole engine against the same engine without drafts.

    Set ``overrides`` to what selects it; ``model`` and ``prompts`` where the bundled model does not suit it.
    """

    overrides: tuple[str, ...] = ()
    model = "bundled"
    prompts: tuple[str, ...] = (
        "What does json.dumps do?",
        "class Counter(dict):\n    def",
        "import os\nimport sys\n\ndef main():\n    parser = argparse.ArgumentParser(description=",
        "x",
    )
    settings: tuple[str, ...] = ("device=cpu", "model.dtype=float32", "model.max_len=512", "seed=7")
    """Of the engine with drafts and of the one without."""

    def engine(self, *overrides: str, drafting: bool = True) -> LLM:
        """An engine; its drafter always drafts as far as it can."""
        if not drafting:
            return _plain(self.model, (*self.settings, *overrides))
        mine = (*self.overrides, "drafter.adaptive=false")
        return LLM(self.model, overrides=[*self.settings, *overrides, *mine])

    def outputs(self, llm: LLM, **sampling: Any) -> list[tuple[int, ...]]:
        settings = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.0, **sampling}
        return [completion.tokens for completion in llm.generate(self.prompts, **settings)]

    def test_declares_what_the_core_plans_with(self) -> None:
        always = "drafter.adaptive=false"
        drafter = bind(assemble([f"model.path={self.model}", *self.settings, *self.overrides, always])).drafter
        assert isinstance(drafter, DeviceDrafter), lacking(drafter, DeviceDrafter)
        assert drafter.placement == "device" and drafter.max_width > 0
        assert drafter.kv_lookahead >= 0 and drafter.weights_bytes >= 0

    def test_outputs_are_those_without_drafts_and_drafts_are_made(self) -> None:
        drafting, plain = self.engine(), self.engine(drafting=False)
        completions = drafting.generate(self.prompts, max_tokens=40, ignore_eos=True, temperature=0.0)
        assert [c.tokens for c in completions] == self.outputs(plain)
        assert all(c.timings is not None and c.timings.drafted_tokens > 0 for c in completions)
        for sampling in ({"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 40}):
            few: dict[str, Any] = {**sampling, "max_tokens": 24}
            assert self.outputs(drafting, **few) == self.outputs(plain, **few)
        self.check_nothing_held(drafting)

    def test_requests_in_chunks_in_turns_and_preempted_come_out_the_same(self) -> None:
        tight = ("scheduler=chunked_prefill", "scheduler.token_budget=24", "scheduler.max_requests=3")
        expected = self.outputs(self.engine(*tight, drafting=False))
        for small in ((), ("memory.kv_tokens=144", "overlap=false")):
            drafting = self.engine(*tight, *small)
            assert self.outputs(drafting) == expected
            self.check_nothing_held(drafting)

    def test_a_prefix_hit_drafts_as_well_as_a_first_request(self) -> None:
        """The drafter's keys are cached with the target's."""
        llm = self.engine("kv_allocator=prefix_cache", "kv_allocator.block_size=8")
        prompt = self.prompts[2] * 3
        first, again = (
            llm.generate([prompt], max_tokens=40, ignore_eos=True, temperature=0.0)[0].timings for _ in range(2)
        )
        assert first is not None and again is not None and again.cached_tokens > 0 == first.cached_tokens
        assert (again.drafted_tokens, again.accepted_tokens) == (first.drafted_tokens, first.accepted_tokens)

    def test_what_says_capturable_asks_nothing_of_the_host(self) -> None:
        """What a capture on a GPU would refuse is refused here, too: no host reads, no uploads."""
        plain = ("execution=eager", "attention_kernel=torch", "scheduler.max_requests=1", "threads=1")
        plan = assemble([f"model.path={self.model}", *self.settings, *plain, *self.overrides])
        bound = bind(plan)
        drafter = on_device(bound.drafter)
        assert drafter is not None
        block_size = bound.context.block_size
        model, device, width = load_plan(plan, bound), plan.device.kind, drafter.max_width
        groups = cache_groups(model.graph.caches, drafter.kv)
        kv = KVCache(groups, bound.kv_format, [4] * groups.num_groups, block_size, plan.dtype, device)
        tables = DeviceTables(1, plan.max_len, width, block_size, device, plan.model.vocab_size, groups.num_groups)
        runner = ModelRunner(model, kv, tables, drafts := Drafts(drafter, tables))
        start_drafter(plan, bound, drafter, runner)
        buckets = graph_buckets(plan, bound, plan.max_len)
        capture_graphs(runner, bound, buckets, _capture_without_the_host)
        assert (drafts.graphs is not None) == may_be_captured(drafter)

    def check_nothing_held(self, llm: LLM) -> None:
        stats = llm.core.stats()
        assert (stats.running, stats.waiting, stats.rows_used, stats.blocks_leased) == (0, 0, 0, 0)


@lru_cache(maxsize=2)
def _plain(model: str, overrides: tuple[str, ...]) -> LLM:
    """Without drafts. Every drafter is compared with the same."""
    return LLM(model, overrides=[*overrides, "drafter=none"])


def _capture_without_the_host(step: Callable[[], None]) -> Callable[[], None]:
    """Runs a function as often as a capture does, the last time refusing what a capture cannot hold."""
    step()
    with NoSync(), as_on_a_gpu():  # type: ignore[no-untyped-call]
        step()
    return step


def suite_for(subject: Subject) -> Suite:
    """For ``engine plugins check``: of where the drafter computes."""
    made = subject.tried(subject.build)
    on_host = made is not None and (made.placement == "host" or made.max_width == 0)
    if on_host or HOST_DRAFTER in subject.trial.provides:
        return filled(subject, [HostDrafterConformance], make=lambda self: subject.build())
    return filled(subject, [DeviceDrafterConformance], overrides=subject.trial.selected_by)
