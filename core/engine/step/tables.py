"""Device tables, indexed by row: what the device knows of everything that runs.

Row ``num_rows`` is nobody's: padding of captured steps points there. Only the device thread touches these tensors, in
plan order, so a row or block that was freed and reused is always written after its former owner's last step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import or_

import torch
from torch import Tensor

from engine.contracts.attention_kernel import AttentionBatch
from engine.contracts.graph import TokenShare
from engine.contracts.request import SamplingParams
from engine.kernels.context import ForwardBatch
from engine.kernels.transfer import upload
from engine.sampling.constrained import Constraints, Watched
from engine.sampling.state import Feature, SamplingState, features_of
from engine.step.plan import Admit, StepPlan, StepRow

UNWRITTEN = -1
"""Poison of token-table entries nobody has written: reading one would index the embedding out of range."""


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What the host's part of a step needs to know of the request in a row."""

    sampling: SamplingParams
    prompt_len: int
    features: Feature


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's rows on the device."""

    forward: ForwardBatch
    row_ids: Tensor
    """int64 ``[R]``"""
    starts: Tensor
    """int64 ``[R]``: position of each row's first token"""
    num_tokens: Tensor
    """int64 ``[R]``: drafts apart"""


@dataclass(frozen=True, slots=True)
class BlockShare:
    """What one of several ranks caches of every block: ``size`` tokens from ``first`` on, of ``block_size``."""

    first: int
    size: int
    block_size: int

    @classmethod
    def of(cls, share: TokenShare, block_size: int) -> BlockShare:
        size = block_size // share.ranks
        return cls(share.index * size, size, block_size)

    def length(self, tokens: Tensor) -> Tensor:
        """How many of a sequence's first ``tokens`` (int64) are here."""
        return tokens // self.block_size * self.size + (tokens % self.block_size - self.first).clamp(0, self.size)

    def most(self, tokens: int) -> int:
        """A bound of :meth:`length` for up to so many tokens."""
        return -(-tokens // self.block_size) * self.size

    def slots(self, blocks: Tensor, offsets: Tensor) -> Tensor:
        """Of tokens at ``offsets`` in blocks; those of other ranks go to the padding block."""
        here = offsets - self.first
        return torch.where((here >= 0) & (here < self.size), blocks * self.size + here, offsets % self.size)


class DeviceTables:
    """``tokens``: int64 ``[num_rows + 1, max_len + max_draft_tokens + 2]``, the text of each row, drafts after it;
    ``block_tables``: int32 ``[num_groups, num_rows + 1, max_blocks]``, by KV group; ``computed``: int64 ``[num_rows +
    1]``, how many tokens of each row have keys and values (confirmed or accepted); ``sampling``: the requests' sampling
    parameters."""

    def __init__(
        self,
        num_rows: int,
        max_len: int,
        max_draft_tokens: int,
        block_size: int,
        device: str,
        vocab_size: int,
        num_groups: int = 1,
        token_shares: Sequence[TokenShare | None] = (),
    ) -> None:
        """``token_shares``: by group, as :attr:`engine.kv.groups.CacheGroups.token_shares`; empty: none."""
        width = max_len + max_draft_tokens + 2
        self.block_size = block_size
        shares = tuple(token_shares) or (None,) * num_groups
        self.block_shares = tuple([None if one is None else BlockShare.of(one, block_size) for one in shares])
        """By KV group, what this rank caches of every block; ``None``: all of it."""
        self.device = device
        self.vocab_size = vocab_size
        self.tokens = torch.full((num_rows + 1, width), UNWRITTEN, dtype=torch.int64, device=device)
        max_blocks = -(-width // block_size)
        self.block_tables = torch.zeros((num_groups, num_rows + 1, max_blocks), dtype=torch.int32, device=device)
        self.computed = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.sampling = SamplingState(num_rows + 1, device)
        self.nobody = num_rows
        """The row no request has: padding reads and writes it, and it always holds tokens."""
        self.tokens[self.nobody] = 0
        self.agreed: Callable[[Tensor], Tensor] = _own
        """Tokens as the rank has them that chooses: with several ranks all must write the same. See
        :meth:`engine.ranks.exchange.Exchange.agreed`."""
        self.constraints: Constraints | None = None
        """Of the rank that chooses tokens."""
        self.requests: dict[int, RowRequest] = {self.nobody: RowRequest(SamplingParams(), 0, Feature.NONE)}

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.block_tables.nbytes + self.computed.nbytes + self.sampling.nbytes

    def apply(self, plan: StepPlan) -> None:
        """Take over the plan's admissions, new blocks, host drafts, and tokens that another rank chose."""
        for admit in plan.admits:
            self._admit(admit)
        of_group, of_row, _ = self.block_tables.stride()
        blocks: list[tuple[int, int]] = []
        tokens: list[tuple[int, int]] = []
        starts: list[tuple[int, int]] = []
        for row in plan.rows:
            for new in row.new_blocks:
                blocks += enumerate(new.blocks, new.group * of_group + row.row_id * of_row + new.start)
            # Who has drafts or tokens for a row has seen all before them: the start is exact.
            begin = row.row_id * self.tokens.shape[1] + row.max_start
            tokens += enumerate(row.drafts, begin + row.num_tokens)
            if row.tokens:
                tokens += enumerate(row.tokens, begin)
                starts.append((row.row_id, row.max_start))
        _scatter(self.block_tables, blocks)
        _scatter(self.tokens, tokens)
        _scatter(self.computed, starts)

    def _admit(self, admit: Admit) -> None:
        row = self.tokens[admit.row_id]
        row[: len(admit.tokens)] = upload(admit.tokens, torch.int64, self.device)
        row[len(admit.tokens) :] = UNWRITTEN
        # The former owner's blocks may be somebody else's now; block 0 is nobody's.
        self.block_tables[:, admit.row_id] = 0
        self.computed[admit.row_id] = admit.num_computed
        self.sampling.write(admit.row_id, admit.sampling, admit.seed, admit.prompt_len, admit.stop_ids)
        if self.constraints is not None:
            outputs = admit.tokens[admit.prompt_len :]
            self.constraints.admit(admit.row_id, admit.sampling, admit.stop_ids, outputs, admit.prompt_len)
        features = features_of(admit.sampling)
        self.requests[admit.row_id] = RowRequest(admit.sampling, admit.prompt_len, features)

    def watch(self, rows: Sequence[StepRow]) -> Watched | None:
        """Before the forward pass of a step: what its masks need of the text of these rows, which choose. ``None`` if
        no row is constrained, or another rank chooses."""
        if self.constraints is None or Feature.CONSTRAINED not in self.features(rows):
            return None
        ids, counts = [row.row_id for row in rows], [row.num_tokens for row in rows]
        return self.constraints.watch(self.tokens, self.computed, ids, counts, [row.num_drafts for row in rows])

    def features(self, rows: Sequence[StepRow]) -> Feature:
        """What any of these rows asks of sampling."""
        return reduce(or_, (self.requests[row.row_id].features for row in rows), Feature.NONE)

    def inputs(self, rows: Sequence[StepRow]) -> StepInputs:
        """Flat inputs of one forward pass, rows one after another. Nothing here waits for the device."""
        count, q_lens = len(rows), tuple(row.num_queries for row in rows)
        ids, num_tokens = [row.row_id for row in rows], [row.num_tokens for row in rows]
        q_starts = list(accumulate(q_lens, initial=0))
        if q_starts[-1] == count:
            row_ids, lengths, starts_of = self._upload(ids, num_tokens, q_starts)
            flat_rows, starts = row_ids, self.computed[row_ids]
            positions = starts
        else:
            flat = [row for row, n in zip(ids, q_lens, strict=True) for _ in range(n)]
            offsets = [j for n in q_lens for j in range(n)]
            row_ids, lengths, starts_of, flat_rows, steps = self._upload(ids, num_tokens, q_starts, flat, offsets)
            starts, positions = self.computed[row_ids], self.computed[flat_rows] + steps
        attention = self.attention(row_ids, starts, q_lens, [row.max_end for row in rows], starts_of, positions)
        forward = ForwardBatch(
            token_ids=self.tokens[flat_rows, positions],
            positions=positions,
            slot_mappings=self.slot_mappings(flat_rows, positions),
            attention=attention,
            row_ids=flat_rows,
        )
        return StepInputs(forward, row_ids, starts, lengths)

    def attention(
        self,
        row_ids: Tensor,
        starts: Tensor,
        q_lens: tuple[int, ...],
        max_ends: Sequence[int],
        q_starts: Tensor,
        positions: Tensor,
    ) -> tuple[AttentionBatch, ...]:
        """Attention metadata, by KV group, of ``q_lens[i]`` tokens of each row from position ``starts[i]`` on.

        ``max_ends``: bounds of the positions after these; ``q_starts``: int64 ``[R + 1]``; ``positions``: int64
        ``[num_tokens]``.
        """
        ends, begins = starts + q_starts.diff(), q_starts.to(torch.int32)
        whole, tables, lengths = tuple(max_ends), self.blocks_of(row_ids, max(max_ends)), ends.to(torch.int32)
        batches = []
        for share, own in zip(self.block_shares, tables, strict=True):
            if share is None:
                batches.append(AttentionBatch(q_lens, whole, own, begins, lengths, self.block_size))
                continue
            bounds, here = tuple([share.most(end) for end in max_ends]), share.length(ends).to(torch.int32)
            key_ends = share.length(positions + 1).to(torch.int32)
            batches.append(AttentionBatch(q_lens, bounds, own, begins, here, share.size, key_ends))
        return tuple(batches)

    def blocks_of(self, row_ids: Tensor, longest: int) -> list[Tensor]:
        """By KV group, int32 ``[R, blocks of longest tokens]``: the block tables of some rows."""
        # A tensor for each group, in memory of its own: kernels are compiled anew for pointers aligned less well.
        count = -(-longest // self.block_size)
        return [tables[row_ids, :count] for tables in self.block_tables]

    def slot_mappings(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """By KV group, where the keys and values of tokens go: int64, of the shape of ``rows`` and ``positions``."""
        blocks, offsets = positions // self.block_size, positions % self.block_size
        found = []
        for share, tables in zip(self.block_shares, self.block_tables, strict=True):
            own = tables[rows, blocks].to(torch.int64)
            found.append(own * self.block_size + offsets if share is None else share.slots(own, offsets))
        return tuple(found)

    def write(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Tokens the device chose become inputs of later steps; all int64 and of one shape.

        A broken row's -1 becomes 0: the step after it may be queued already, it is dropped, but must find a token
        to embed.
        """
        self.tokens[rows, positions] = tokens.clamp(min=0)

    def write_drafts(self, rows: Tensor, positions: Tensor, drafts: Tensor) -> Tensor:
        """Put ``drafts`` (int64 ``[R, num_draft_tokens]``) after the newest token of each row, which is at
        ``positions [R]``. Returns a bool: whether all are tokens; others are replaced by one, for the step after must
        be able to embed them."""
        drafts = self.agreed(drafts)
        valid = (drafts >= 0) & (drafts < self.vocab_size)
        after = positions[:, None] + torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
        self.tokens[rows[:, None], after] = torch.where(valid, drafts, 0)
        return valid.all()

    def _upload(self, *parts: Sequence[int]) -> tuple[Tensor, ...]:
        return _upload_parts(parts, self.device)


def _own(tokens: Tensor) -> Tensor:
    """What is chosen here is what all write."""
    return tokens


def _scatter(table: Tensor, entries: list[tuple[int, int]]) -> None:
    """``table.flatten()[index] = value`` for each ``(index, value)``. ``table``: int32 or int64, contiguous."""
    if not entries:
        return
    if table.device.type == "cpu":
        # A few numbers a step, written in a tenth of the time that torch takes.
        number = ctypes.c_int64 if table.dtype == torch.int64 else ctypes.c_int32
        numbers = (number * table.numel()).from_address(table.data_ptr())
        for at, value in entries:
            numbers[at] = value
    else:
        index, values = _upload_parts(tuple(zip(*entries, strict=True)), str(table.device))
        table.view(-1)[index] = values.to(table.dtype)


def _upload_parts(parts: Sequence[Sequence[int]], device: str) -> tuple[Tensor, ...]:
    """Several int64 vectors in one copy."""
    together = upload([value for part in parts for value in part], torch.int64, device)
    return torch.split(together, [len(part) for part in parts])
