"""How many drafts to ask for, and drafts on the host: what a request's grammar forces (``forcing.py``), else what the
drafter says."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.contracts.drafter import Draft, Drafter, DraftRow, HostDrafter, cached_by
from engine.drafting.policy import DraftPolicy
from engine.loop.draft_cost import DraftSample
from engine.loop.forcing import MOST_S, Forcing, MatcherOf
from engine.loop.sequence import Sequence
from engine.plugin_guard.calls import PluginError, contract_error, describe_error, quote
from engine.step.plan import StepPlan, StepResult


@dataclass(slots=True)
class Drafted:
    """What the drafts of a step came to."""

    tried: list[int] = field(default_factory=list)
    """By position in a chain: drafts all of whose predecessors were accepted."""
    accepted_at: list[int] = field(default_factory=list)
    """Those that were accepted as well."""
    drafted: int = 0
    chains: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)
    """Of each request that decodes: drafts asked for, and accepted."""

    @property
    def accepted(self) -> int:
        return sum(self.accepted_at)

    def add(self, asked: int, num_drafts: int, accepted: int) -> None:
        """A chain of ``num_drafts`` drafts, perhaps none, of which the first ``accepted`` were accepted."""
        self.asked.append((asked, accepted))
        self.drafted += num_drafts
        self.chains += num_drafts > 0
        for counts, upto in ((self.tried, min(num_drafts, accepted + 1)), (self.accepted_at, accepted)):
            counts.extend([0] * (upto - len(counts)))
            for position in range(upto):
                counts[position] += 1


class Drafting:
    """Asks the policy how many drafts, and a drafter on the host for those of requests whose tokens are known."""

    def __init__(
        self, drafter: Drafter, policy: DraftPolicy, vocab_size: int, matcher_of: MatcherOf | None = None
    ) -> None:
        """``matcher_of``: of an output's grammar, whose forced tokens are drafts, too; ``None``: of none."""
        self._matcher_of = matcher_of
        self._host = drafter if isinstance(drafter, HostDrafter) and drafter.placement == "host" else None
        self._policy = policy
        self._vocab_size = vocab_size
        self._enabled = drafter.max_width > 0
        kv = cached_by(drafter)
        self._keeps_keys = kv is not None and bool(kv.caches)
        self.on_host = self._enabled and self._host is not None
        self._failed: list[tuple[Sequence, str]] = []
        """Requests about which a drafter on the host could not be asked."""

    @property
    def max_width(self) -> int:
        return self._policy.max_width

    @contextmanager
    def always(self, num_drafts: int) -> Iterator[None]:
        """See :meth:`engine.loop.core.EngineCore.drafting`."""
        kept, self._policy = self._policy, DraftPolicy(min(num_drafts, self._policy.max_width), adaptive=False)
        try:
            yield
        finally:
            self._policy = kept

    def prepare(self, running: list[Sequence]) -> int:
        """How many drafts were asked for, of each request that decodes in the next step, or are now: a drafter on the
        host is asked about those whose tokens are known."""
        if not self._enabled:
            return 0
        decoding = [s for s in running if s.decodes]
        if self._host is None or not decoding:
            return max((s.device_drafts for s in decoding), default=0)
        asked = self._policy.num_draft_tokens(len(decoding))
        settled = [s for s in decoding if s.pending == 0 and s.proposed_at != len(s.tokens)]
        self._propose(self._host, settled, asked)
        return asked

    def asked_of(self, sequence: Sequence, asked: int) -> int:
        """Drafts that were asked for of this request, to be verified now: a drafter on the host may have had nothing to
        say, one on the device was not asked about every request."""
        if not sequence.decodes:
            return 0
        return min(asked if self._host is not None else sequence.device_drafts, sequence.max_drafts)

    def waits_for_tokens(self, sequence: Sequence, asked: int) -> bool:
        """A drafter on the host looks at all tokens of a request, so none may be in flight when drafts are wanted."""
        if self._host is None or sequence.pending == 0 or not sequence.decodes:
            return False
        return min(asked, sequence.max_drafts) > 0

    def wants_after(self, sampling: SequenceOf[Sequence]) -> dict[Sequence, int]:
        """How many drafts a drafter on the device is to propose after a step in which these get their next tokens:
        none for those whose tokens it has not all seen."""
        if not self._enabled or self._host is not None:
            return {}
        synced = [s for s in sampling if s.drafter_synced or not self._keeps_keys]
        return dict.fromkeys(synced, self._policy.num_draft_tokens(len(sampling))) if synced else {}

    def syncs(self, decoding: SequenceOf[Sequence]) -> bool:
        """Whether a drafter on the device sees a step in which these decode although nobody drafts after it."""
        synced = self._enabled and self._keeps_keys and any(s.drafter_synced for s in decoding)
        return synced and self._policy.is_on(len(decoding))

    def observe(self, plan: StepPlan, drafted: Drafted, result: StepResult, gap_ms: float | None) -> None:
        """What a step came to: its drafts, its times, and how long the device had waited before it, for a drafter on
        the host among others (``None``: nobody waited, no request was running)."""
        if not self._enabled or not drafted.asked:
            return
        decodes = len(drafted.asked) == len(plan.rows)
        # What a drafter on the device does after this step is for the next: typical where that asks for as many.
        steady = self._host is not None or max(row.wants_drafts for row in plan.rows) == max(
            asked for asked, _ in drafted.asked
        )
        ms = None
        if decodes and steady and gap_ms is not None:
            ms = gap_ms + result.device_ms + result.draft_ms
        self._policy.observe(drafted.asked, ms)

    def sample(self, plan: StepPlan, host_ms: float, drafted: Drafted, result: StepResult) -> DraftSample:
        """What a step tells of the drafter's cost. ``host_ms``: that a drafter on the host took before it."""
        asked = [asked for asked, _ in drafted.asked]
        counts = (sum(each > 0 for each in asked), drafted.chains, drafted.tried, drafted.accepted_at)
        if self._host is not None:
            return DraftSample(host_ms if any(asked) else 0.0, 0, asked, *counts)
        ms = result.draft_ms if plan.syncs_drafter else 0.0
        return DraftSample(ms, plan.num_tokens, [row.wants_drafts for row in plan.rows], *counts)

    def take_failed(self) -> list[tuple[Sequence, str]]:
        """Requests that cannot go on, and why: a drafter on the host fails on them, even asked about one alone."""
        failed, self._failed = self._failed, []
        return failed

    def _propose(self, drafter: HostDrafter, sequences: list[Sequence], asked: int) -> None:
        forced = self._forced([s for s in sequences if s.request.sampling.grammar is not None], asked)
        about = []
        for sequence in sequences:
            sequence.propose(ahead := forced.get(sequence, ()))
            if not ahead and min(asked, sequence.max_drafts):
                about.append(sequence)
        if not about:
            return
        rows = [
            DraftRow(s.row_id, s.tokens, s.prompt_len, min(asked, s.max_drafts), s.request.cache_salt) for s in about
        ]
        try:
            drafts = self._ask(drafter, rows)
        except PluginError as error:
            traceback.print_exception(error)
            self._ask_one_by_one(drafter, about, rows)
            return
        for sequence, tokens in zip(about, drafts, strict=True):
            sequence.propose(tokens)

    def _forced(self, sequences: list[Sequence], asked: int) -> dict[Sequence, tuple[int, ...]]:
        """What the grammars of these requests say that comes next: of those that could be asked in time."""
        found: dict[Sequence, tuple[int, ...]] = {}
        if self._matcher_of is None or not sequences:
            return found
        begun_s = time.thread_time()
        for sequence in sequences:
            if not (most := min(asked, sequence.max_drafts)):
                continue
            if time.thread_time() - begun_s > MOST_S:
                break
            sampling = sequence.request.sampling
            try:
                if sequence.forcing is None:
                    sequence.forcing = Forcing(self._matcher_of(sampling, tuple(sequence.stop_ids)))
                tokens = tuple(sequence.forcing.after(sequence.tokens, sequence.prompt_len))[:most]
                problem = self._problem(tokens, most)
            except Exception as error:  # a plugin may fail in any way; the request fails, not the step of others
                tokens, problem = (), describe_error(error)
            if problem:
                self._failed.append((sequence, f"the grammar's forced tokens: {problem}"))
            else:
                found[sequence] = tokens
        return found

    def _ask_one_by_one(self, drafter: HostDrafter, about: list[Sequence], rows: list[DraftRow]) -> None:
        """A drafter failed on several requests: only those fail on which it fails alone."""
        for sequence, row in zip(about, rows, strict=True):
            try:
                (tokens,) = self._ask(drafter, [row])
            except PluginError as error:
                self._failed.append((sequence, str(error)))
            else:
                sequence.propose(tokens)

    def _ask(self, drafter: HostDrafter, rows: list[DraftRow]) -> list[tuple[int, ...]]:
        """Its drafts, row by row. Raises :class:`PluginError`."""
        lengths = [len(row.tokens) for row in rows]
        try:
            draft = drafter.propose(rows)
        except Exception as error:
            raise PluginError(describe_error(error, drafter, "propose")) from error
        if lengths != [len(row.tokens) for row in rows]:
            raise contract_error(drafter, "propose", "changed the tokens of a request, which are to be read alone")
        if not isinstance(draft, Draft) or not isinstance(draft.tokens, tuple | list):
            raise contract_error(
                drafter, "propose", f"returned {quote(draft)}, expected a Draft with a tuple of tokens a row"
            )
        if len(draft.tokens) != len(rows):
            raise contract_error(drafter, "propose", f"answered {len(draft.tokens)} rows, expected {len(rows)}")
        for row, tokens in zip(rows, draft.tokens, strict=True):
            problem = self._problem(tokens, row.num_draft_tokens)
            if problem:
                raise contract_error(drafter, "propose", problem)
        return [tuple(tokens) for tokens in draft.tokens]

    def _problem(self, tokens: object, most: int) -> str:
        """Why this is no proposal; empty if it is one."""
        if not isinstance(tokens, tuple | list):
            return f"proposed {quote(tokens)}, expected a tuple of token ids"
        if len(tokens) > most:
            return f"proposed {len(tokens)} tokens, at most {most} were wanted"
        for token in tokens:
            if type(token) is not int or not 0 <= token < self._vocab_size:
                return f"proposed token {quote(token)}, expected an int from 0 to {self._vocab_size - 1}"
        return ""
