"""Conformance suite for drafters: derive a test class, say how to make yours, and run pytest.

.. code-block:: python

    class TestMine(DrafterConformance):
        def make(self):
            return Mine(MineConfig(max_width=4), context)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.contracts.drafter import Draft, Drafter, DraftRow


class DrafterConformance:
    """What the core relies on. Override the class attributes to fit the drafter's model.

    For drafters on the device the suite plays the core's part: it calls ``extend`` with every token before it asks
    for proposals. Drafters with ``kv`` need a cache that only the engine provides; they override :meth:`advance`.
    """

    vocab_size = 64
    hidden_size = 32
    history: tuple[int, ...] = (5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7)
    """A history the drafter should have something to say about."""

    def make(self) -> Drafter:
        """A fresh drafter."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def advance(self, drafter: Drafter, slot: int, tokens: Sequence[int], next_token: int) -> None:
        """Tell the drafter that the target computed ``tokens`` and that ``next_token`` follows them."""
        following = [*tokens[1:], next_token]
        taps = [torch.zeros(len(tokens), self.hidden_size) for _ in drafter.taps]
        drafter.extend([slot] * len(tokens), torch.tensor(tokens), torch.tensor(following), taps)

    def ask(self, drafter: Drafter, slots: Sequence[int], width: int, history: Sequence[int] | None = None) -> Draft:
        """Proposals for ``slots``, each with the same history."""
        tokens = list(self.history if history is None else history)
        seen = tokens if drafter.placement == "host" else []
        prompt_len = max(1, len(tokens) // 2)
        return drafter.propose([DraftRow(slot, list(seen), prompt_len, width) for slot in slots])

    def started(self, slots: Sequence[int] = (0,)) -> Drafter:
        drafter = self.make()
        for slot in slots:
            self.advance(drafter, slot, self.history[:-1], self.history[-1])
        return drafter

    def check(self, drafter: Drafter, draft: Draft, num_rows: int, width: int) -> None:
        """A draft is well-formed: one tuple a row, widths kept, ids in the vocabulary, probabilities that fit."""
        assert len(draft.tokens) == num_rows, "one proposal per row, in the order of the rows"
        for tokens in draft.tokens:
            assert isinstance(tokens, tuple), "proposals are tuples"
            assert len(tokens) <= min(width, drafter.max_width), "no more tokens than wanted"
            assert all(type(t) is int and 0 <= t < self.vocab_size for t in tokens), "ids in the vocabulary"
        assert (draft.probs is not None) <= drafter.returns_probs, "probabilities only where declared"
        if draft.probs is not None:
            probs = draft.probs
            assert probs.dtype == torch.float32
            assert probs.shape == (num_rows, width, self.vocab_size)
            for row, tokens in zip(probs, draft.tokens):
                for entry, token in zip(row, tokens):
                    assert torch.isclose(entry.sum(), torch.tensor(1.0), atol=1e-4)
                    assert entry[token] > 0, "a proposed token has a positive probability"

    def test_declares_what_the_core_plans_with(self) -> None:
        drafter = self.make()
        assert isinstance(drafter, Drafter)
        assert drafter.placement in ("host", "device")
        assert drafter.max_width >= 0 and drafter.kv_lookahead >= 0
        assert all(tap >= 0 for tap in drafter.taps)

    def test_never_proposes_more_than_wanted(self) -> None:
        for width in range(1, self.make().max_width + 1):
            drafter = self.started()
            self.check(drafter, self.ask(drafter, [0], width), 1, width)

    def test_proposes_for_the_history_it_was_made_for(self) -> None:
        drafter = self.started()
        if drafter.max_width:
            assert self.ask(drafter, [0], drafter.max_width).tokens[0], "override `history`"

    def test_rows_of_a_batch_do_not_influence_each_other(self) -> None:
        slots = [3, 1, 2]
        drafter = self.started(slots)
        width = drafter.max_width
        if width and not drafter.returns_probs:
            alone = self.ask(self.started([1]), [1], width).tokens[0]
            draft = self.ask(drafter, slots, width)
            self.check(drafter, draft, len(slots), width)
            assert draft.tokens == (alone,) * len(slots)

    def test_an_empty_batch_is_fine(self) -> None:
        drafter = self.make()
        assert self.ask(drafter, [], max(1, drafter.max_width)).tokens == ()

    def test_released_and_unknown_slots_can_be_released(self) -> None:
        drafter = self.started([0])
        drafter.release(0)
        drafter.release(0)
        drafter.release(7)

    def test_a_reused_slot_knows_nothing_of_its_former_request(self) -> None:
        other = tuple(reversed(self.history))
        used = self.started([0])
        fresh = self.make()
        if not used.max_width or used.returns_probs:
            return
        self.ask(used, [0], used.max_width)
        used.release(0)
        for drafter in (used, fresh):
            self.advance(drafter, 0, other[:-1], other[-1])
        assert self.ask(used, [0], used.max_width, other).tokens == self.ask(fresh, [0], fresh.max_width, other).tokens
