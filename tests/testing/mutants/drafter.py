"""Drafters with a bug each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from engine.assembly.errors import AssemblyError
from engine.contracts.drafter import Draft, DraftRow, DraftRows, DraftTokens
from engine.testing.context import build_context
from engine.testing.drafter import DeviceDrafterConformance, HostDrafterConformance
from engine_plugins.drafter import early_exit
from engine_plugins.drafter.early_exit import EarlyExitDrafter
from engine_plugins.drafter.ngram import NgramConfig, NgramDrafter
from engine_plugins.drafter.suffix import SuffixConfig, SuffixDrafter, _Request
from tests.testing.mutants.mutant import OnPlugin, mutant

WANTED = "test_never_proposes_more_than_wanted"
OTHERS = "test_rows_of_a_batch_do_not_influence_each_other"
TENANTS = "test_a_tenant_gets_nothing_of_another_tenants_text"
REUSED = "test_a_reused_row_knows_nothing_of_a_request_of_another_tenant"
LENGTHS = "test_histories_of_any_length_are_fine"


class Suite(OnPlugin, HostDrafterConformance):
    def make(self) -> Any:
        return self.plugin(NgramConfig(max_width=5), build_context())


class SuffixSuite(OnPlugin, HostDrafterConformance):
    def make(self) -> Any:
        return self.plugin(SuffixConfig(max_width=5, min_confidence=0.0), build_context())


class DeviceSuite(OnPlugin, DeviceDrafterConformance):
    overrides = ("drafter=early_exit", "drafter.layers=3")

    @classmethod
    def installed(cls) -> AbstractContextManager[Any]:
        return patch.object(early_exit, "EarlyExitDrafter", cls.plugin)


@mutant(Suite, TENANTS)
class OneTableForAll(NgramDrafter):
    """Looks pairs of tokens up in what all tenants have written."""

    def __init__(self, config: NgramConfig, context: Any) -> None:
        super().__init__(config, context)
        self._next: dict[tuple[int, ...], int] = {}

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        for row in rows:
            for pair in zip(row.tokens, row.tokens[1:], row.tokens[2:]):
                self._next[pair[:2]] = pair[2]
        return Draft(tuple(self._follow(list(row.tokens[-2:]), row.num_draft_tokens) for row in rows))

    def _follow(self, tail: list[int], count: int) -> tuple[int, ...]:
        start = len(tail)
        while len(tail) - start < count and tuple(tail[-2:]) in self._next:
            tail.append(self._next[tuple(tail[-2:])])
        return tuple(tail[start:])


@mutant(Suite, TENANTS)
class FallsBackToOthers(OneTableForAll):
    """Asks the table of all tenants where a request's own text has nothing to say."""

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        own = NgramDrafter.propose(self, rows).tokens
        shared = super().propose(rows).tokens
        return Draft(tuple(mine or theirs for mine, theirs in zip(own, shared, strict=True)))


@mutant(Suite, OTHERS)
class SeededByRow(NgramDrafter):
    """Lets the number of a row decide how much it proposes."""

    def _propose(self, row: DraftRow) -> tuple[int, ...]:
        return super()._propose(row)[: 1 + row.row_id % 3]


@mutant(SuffixSuite, TENANTS, REUSED)
class ForgetsTheSalt(SuffixDrafter):
    """Keeps the outputs of finished requests of all tenants together."""

    def _take_in(self, row: DraftRow) -> _Request:
        request = super()._take_in(row)
        request.salt = ""
        return request

    def _propose(self, row: DraftRow) -> tuple[int, ...]:
        return super()._propose(DraftRow(row.row_id, row.tokens, row.prompt_len, row.num_draft_tokens, ""))


@mutant(SuffixSuite, REUSED)
class StaleAfterRelease(SuffixDrafter):
    """Goes on with the text of the request that had the row before."""

    def release(self, row_id: int) -> None:
        pass


@mutant(Suite, WANTED)
class OneTooMany(NgramDrafter):
    """Proposes one token more than is wanted."""

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return Draft(tuple(tokens + tokens[-1:] for tokens in super().propose(rows).tokens))


@mutant(Suite, OTHERS)
class WantedByTheFirst(NgramDrafter):
    """Gives every row as many tokens as the first one wants."""

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        wanted = max((row.num_draft_tokens for row in rows), default=0)
        alike = [DraftRow(row.row_id, row.tokens, row.prompt_len, wanted, row.salt) for row in rows]
        return super().propose(alike)


@mutant(Suite, OTHERS)
class InOrderOfRows(NgramDrafter):
    """Returns proposals by row id, not in the order in which rows were given."""

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return super().propose(sorted(rows, key=lambda row: row.row_id))


@mutant(Suite, OTHERS)
class LeavesRowsOut(NgramDrafter):
    """Returns proposals of the rows that have some."""

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return Draft(tuple(tokens for tokens in super().propose(rows).tokens if tokens))


@mutant(Suite, "test_an_empty_batch_is_fine", raises=IndexError)
class RaisesOnNoRows(NgramDrafter):
    """Looks at the first row of a batch that may have none."""

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        assert rows[0].num_draft_tokens
        return super().propose(rows)


@mutant(Suite, LENGTHS)
class PaddedWithMinusOne(NgramDrafter):
    """Fills proposals up to what is wanted with -1."""

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        found = super().propose(rows).tokens
        return Draft(tuple(t + (-1,) * (row.num_draft_tokens - len(t)) for t, row in zip(found, rows, strict=True)))


@mutant(Suite, WANTED)
class Lists(NgramDrafter):
    """Returns lists, which it might go on writing to."""

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return Draft(tuple(list(tokens) for tokens in super().propose(rows).tokens))  # type: ignore[misc]


@mutant(Suite, WANTED)
class FloatTokens(NgramDrafter):
    """Returns ids as floats, as some libraries' tables hold them."""

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return Draft(tuple(tuple(float(t) for t in tokens) for tokens in super().propose(rows).tokens))  # type: ignore[misc]


@mutant(Suite, LENGTHS, raises=IndexError)
class NeedsTwoTokens(NgramDrafter):
    """Looks at the last two tokens of a history that may have one."""

    def _propose(self, row: DraftRow) -> tuple[int, ...]:
        assert row.tokens[-2] >= 0
        return super()._propose(row)


@mutant(Suite, "test_histories_are_left_alone")
class WritesItsDraft(NgramDrafter):
    """Extends the request's own tokens while it drafts."""

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        draft = super().propose(rows)
        for row, tokens in zip(rows, draft.tokens, strict=True):
            row.tokens.extend(tokens)  # type: ignore[attr-defined]
        return draft


@mutant(Suite, "test_released_and_unknown_slots_can_be_released", raises=KeyError)
class ReleasesTheKnown(NgramDrafter):
    """Raises for a row that it has never seen."""

    def release(self, row_id: int) -> None:
        del self._indexes[row_id]


@mutant(Suite, "test_proposes_for_the_history_it_was_made_for")
class NeverAnOldMatch(NgramDrafter):
    """Begins its search after the tokens that it searches in, so that it finds nothing."""

    def _propose(self, row: DraftRow) -> tuple[int, ...]:
        self._indexes.pop(row.row_id, None)
        tokens = row.tokens[-2:]
        return super()._propose(DraftRow(row.row_id, tokens, row.prompt_len, row.num_draft_tokens, row.salt))


@mutant(Suite, "test_declares_what_the_core_plans_with")
class DraftsOnNoDevice(NgramDrafter):
    """Says that it drafts on a GPU, with the methods of a drafter on the host."""

    placement: Any = "gpu"


@mutant(Suite, missed="what a drafter keeps is its own affair, and a suite is over before it shows")
class KeepsEverything(NgramDrafter):
    """Keeps the tokens of every request for ever."""

    def __init__(self, config: NgramConfig, context: Any) -> None:
        super().__init__(config, context)
        self._kept: list[list[int]] = []

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        self._kept += [list(row.tokens) for row in rows]
        return super().propose(rows)


CAPTURED = "test_what_says_capturable_asks_nothing_of_the_host"


@mutant(DeviceSuite, CAPTURED, raises=AssemblyError)
class ReadsTheNewest(EarlyExitDrafter):
    """Reads the newest tokens on the host with ``tolist``."""

    def propose(self, rows: DraftRows) -> DraftTokens:
        newest = rows.tokens.tolist()
        return super().propose(rows) if newest else DraftTokens(rows.tokens[:, None])


@mutant(DeviceSuite, CAPTURED, raises=AssemblyError)
class LooksForThePromising(EarlyExitDrafter):
    """Asks on the host whether any row is worth drafting."""

    def propose(self, rows: DraftRows) -> DraftTokens:
        assert (rows.positions >= 0).any()
        return super().propose(rows)


@mutant(DeviceSuite, "test_outputs_are_those_without_drafts_and_drafts_are_made")
class BeyondTheVocabulary(EarlyExitDrafter):
    """Proposes ids that are not in the vocabulary."""

    def propose(self, rows: DraftRows) -> DraftTokens:
        tokens: Tensor = super().propose(rows).tokens
        return DraftTokens(tokens + (1 << 20))
