"""Outputs that follow a grammar: a matcher for each row of the device tables, and the mask of every position.

A step's tokens reach the host while the step after it computes: what a row's matcher has not seen is copied before the
forward pass of a step, and the matcher follows and writes the step's masks while that runs. So plans are made ahead, as
for any other request.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from engine import native
from engine.contracts.constraint import CANNOT_FOLLOW, Constraint, Grammar, GrammarError, Matcher
from engine.contracts.request import SamplingParams
from engine.kernels.transfer import Arriving, download, upload
from engine.kernels.triton.device import runs_triton
from engine.plugin_guard.calls import describe_error
from engine.sampling.reasoning import ReasoningMatcher
from engine.sampling.sources import MASK

FAILED = f"{CANNOT_FOLLOW}: "
SPARE_S = 0.1
"""CPU time that the masks of a request may take beyond their mean."""
STEP_S = 0.25
"""CPU time of a step's masks after which no row whose last ones were slow gets another."""


class Grammars:
    """Compiles grammars. Safe to use from several threads.

    Every output has a matcher that was compiled for it: what a library learns while it matches one output must not slow
    down or fail the next.
    """

    def __init__(self, constraint: Constraint, max_ready: int, per_output: int = 1) -> None:
        """``max_ready``: most outputs that have not begun for which matchers are kept; ``per_output``: how many each
        takes, two where what it forces is drafted."""
        self._constraint = constraint
        self._per_output = per_output
        self._lock = threading.Lock()
        self._ready: deque[tuple[Grammar, Matcher]] = deque(maxlen=max_ready * per_output)

    def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar for an output that begins soon. Raises :class:`GrammarError`."""
        made = [(grammar, self._constraint.compile(grammar)) for _ in range(self._per_output)]
        with self._lock:
            self._ready.extend(made)

    def matcher(self, grammar: Grammar) -> Matcher:
        """One at the beginning of an output. Raises :class:`GrammarError`."""
        with self._lock:
            for entry in self._ready:
                if entry[0] == grammar:
                    self._ready.remove(entry)
                    return entry[1]
        return self._constraint.compile(grammar)

    def matcher_of(self, sampling: SamplingParams, stop_ids: Sequence[int]) -> Matcher | None:
        """Of an output, its thought included; ``None``: anything may come. ``stop_ids``: tokens that end it. Raises
        :class:`GrammarError`."""
        answer = None if sampling.grammar is None else self.matcher(sampling.grammar)
        return answer if sampling.reasoning is None else ReasoningMatcher(sampling.reasoning, answer, stop_ids)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """What rows of a step may choose."""

    index: Tensor
    """int64 ``[M]``: the constrained rows of logits, on the device."""
    words: Tensor
    """int32 ``[M, ceil(vocab_size / 32)]``, on the device: bit ``i % 32`` of word ``i // 32`` allows token ``i``."""
    errors: Mapping[int, str]
    """By number among the step's rows that choose: why a row's matcher cannot go on."""
    by_native_code: bool = False
    """On a CPU: by C++ instead of torch, whose threads would take the cores from those of the kernels."""

    def apply_(self, logits: Tensor) -> None:
        """Minus infinity for what is forbidden. ``logits``: float32 ``[N, V]``, changed in place."""
        if runs_triton(logits.device):
            from engine.sampling.triton.masks import mask_on_device  # Triton is imported only where it runs

            mask_on_device(logits, self.index, self.words)
            return
        if self.by_native_code:
            _kernels().mask_logits(
                native.pointer(logits), logits.stride(0), logits.shape[1], native.pointer(self.index), len(self.index),
                native.pointer(self.words), self.words.shape[1],
            )  # fmt: skip
            return
        of_byte = _of_bytes()[self.words.view(torch.uint8).flatten().to(torch.int32)]
        logits.index_add_(0, self.index, of_byte.view(len(self.words), -1)[:, : logits.shape[1]])


class Constraints:
    """The matchers of the rank that chooses tokens. Only the device thread uses them."""

    def __init__(
        self,
        grammars: Grammars,
        vocab_size: int,
        max_draft_tokens: int,
        by_native_code: bool = False,
        mask_s: float = math.inf,
    ) -> None:
        """``by_native_code``: see :attr:`TokenMasks.by_native_code`. ``mask_s``: see :attr:`MatchedRow.mask_s`."""
        self._mask_s = mask_s
        self.by_native_code = by_native_code
        self.num_words = -(-vocab_size // 32)
        self.most_unseen = max_draft_tokens + 1
        """A step brings at most so many tokens."""
        self._grammars = grammars
        self._rows: dict[int, MatchedRow] = {}

    def admit(
        self, row_id: int, sampling: SamplingParams, stop_ids: Sequence[int], outputs: Sequence[int], prompt_len: int
    ) -> None:
        """A request takes a row, or starts again in it: after ``outputs``. ``stop_ids``: tokens that end it."""
        self._rows.pop(row_id, None)
        if sampling.grammar is None and sampling.reasoning is None:
            return
        row = self._rows[row_id] = MatchedRow(prompt_len - 1, mask_s=self._mask_s)
        try:
            row.matcher = self._grammars.matcher_of(sampling, stop_ids)
            row.advance(outputs)
        except Exception as error:  # a plugin may fail in any way; the request fails, not the admission of others
            row.error = f"{FAILED}{describe_error(error)}"

    def watch(
        self,
        tokens: Tensor,
        computed: Tensor,
        row_ids: Sequence[int],
        num_tokens: Sequence[int],
        num_drafts: Sequence[int],
    ) -> Watched | None:
        """Begin to copy what the matchers of a step's rows have not seen, before the step moves them on. ``None`` if no
        row is constrained.

        ``tokens``, ``computed``: of the device tables. Of each row that chooses: its id, and how many known tokens and
        drafts the step has of it.
        """
        members = [number for number, row_id in enumerate(row_ids) if row_id in self._rows]
        if not members:
            return None
        rows = [self._rows[row_ids[number]] for number in members]
        own = [row_ids[number] for number in members], [num_tokens[number] for number in members]
        ids, counts = upload([*own[0], *own[1]], torch.int64, tokens.device).view(2, -1).unbind()
        ends = computed[ids] + counts
        around = torch.arange(-self.most_unseen, max(num_drafts[number] for number in members), device=tokens.device)
        text = tokens[ids[:, None], (ends[:, None] + around).clamp(min=0)]
        return Watched(self, rows, members, num_drafts, download((ends, text)))


@dataclass(slots=True)
class MatchedRow:
    """A constrained request: its matcher, and how far that has come in its text."""

    position: int
    """Of the last token that it has taken."""
    matcher: Matcher | None = None
    error: str = ""
    """Why it takes no more."""
    mask_s: float = math.inf
    """CPU seconds that its masks may take in the mean, beyond :data:`SPARE_S` in all."""
    spare_s: float = SPARE_S
    """What is left."""
    is_slow: bool = False
    """The last ones took longer than the mean may be."""

    def advance(self, tokens: Sequence[int]) -> None:
        self.position += len(tokens)
        if self.matcher is None or self.error:
            return
        try:
            for token in tokens:
                if not self.matcher.advance(token):
                    raise GrammarError(f"it forbids token {token}")
        except Exception as error:
            self._fail(error)

    def fill(self, drafts: Sequence[int], words: Tensor) -> None:
        """The masks after its last token and after each draft, as far as the grammar allows the drafts: what comes
        after another one is not looked at. ``words``: ``[1 + len(drafts), num_words]``."""
        if self.matcher is None or self.error:
            return
        taken, begun_s = 0, time.thread_time()
        try:
            self.matcher.fill(words[0])
            for number, draft in enumerate(drafts, 1):
                if not self.matcher.advance(draft):
                    break
                taken += 1
                self.matcher.fill(words[number])
            self.matcher.roll_back(taken)
        except Exception as error:
            self._fail(error)
        else:
            spare_s = (1 + taken) * self.mask_s - (time.thread_time() - begun_s)
            self.is_slow, self.spare_s = spare_s < 0, min(SPARE_S, self.spare_s + spare_s)
            if self.spare_s < 0:
                self.give_up()

    def _fail(self, error: Exception) -> None:
        """A plugin may fail in any way; the request fails, not the step of others."""
        self.error = f"{FAILED}{error if isinstance(error, GrammarError) else describe_error(error)}"

    def give_up(self) -> None:
        limit = f"constraint.mask_ms={1e3 * self.mask_s:g}"
        self.error = f"{FAILED}finding out what may come next takes too long ({limit})"


@dataclass(frozen=True, slots=True)
class Watched:
    """The text of a step's constrained rows, on its way to the host."""

    constraints: Constraints
    rows: Sequence[MatchedRow]
    members: Sequence[int]
    """Their numbers among the rows that choose."""
    num_drafts: Sequence[int]
    """Of all rows that choose."""
    arriving: Arriving

    def masks(self, device: torch.device | str, queries: int | None = None) -> TokenMasks:
        """The step's masks; waits for the tokens of the steps before it. ``queries``: rows of logits of each row where
        all have as many; ``None``: ``1 + num_drafts``."""
        ends, texts = (tensor.tolist() for tensor in self.arriving.wait())
        sizes = [1 + count if queries is None else queries for count in self.num_drafts]
        begins = list(accumulate(sizes, initial=0))
        index = [begins[number] + i for number in self.members for i in range(1 + self.num_drafts[number])]
        words = torch.full((len(index), self.constraints.num_words), -1, dtype=torch.int32)
        at, back, begun_s = 0, self.constraints.most_unseen, time.thread_time()
        for row, number, end, text in zip(self.rows, self.members, ends, texts, strict=True):
            unseen, drafts = end - 1 - row.position, self.num_drafts[number]
            assert 0 <= unseen <= back, f"{unseen} tokens unseen, at most {back} kept"
            row.advance(text[back - unseen : back])
            if row.is_slow and time.thread_time() - begun_s > STEP_S:
                row.give_up()
            row.fill(text[back : back + drafts], words[at : at + 1 + drafts])
            at += 1 + drafts
        errors = {number: row.error for row, number in zip(self.rows, self.members, strict=True) if row.error}
        on_device = upload(index, torch.int64, device), words.to(device)
        return TokenMasks(*on_device, errors, self.constraints.by_native_code)


@cache
def _of_bytes() -> Tensor:
    """float32 ``[256, 8]``: what the bits of a byte add to eight logits."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(bits == 1, 0.0, float("-inf"))


@cache
def _kernels() -> Any:
    """Raises :class:`engine.native.NativeError`."""
    pointer, number = native.POINTER, native.INT64
    return native.load(MASK.file, {"mask_logits": (pointer, number, number, pointer, number, pointer, number)})
