"""A drafter on the device at work: after each step it sees what the target computed, and proposes what may come next.

Its drafts go into the token tables, where the next step finds them. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.contracts.drafter import DeviceDrafter, DraftRows, TargetStep
from engine.drafting.graphs import DraftGraphs, propose
from engine.kernels.metadata import ForwardMetadata
from engine.kernels.transfer import upload
from engine.sampling.state import Feature
from engine.step.graphs import CapturedStep
from engine.step.plan import StepPlan
from engine.step.tables import DeviceTables, StepInputs


@dataclass(slots=True)
class Drafts:
    """Fulfils :class:`engine.step.runner.AfterSteps`."""

    drafter: DeviceDrafter
    """Already started."""
    tables: DeviceTables
    graphs: DraftGraphs | None = None
    """Of what the drafter does after captured steps."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return tuple(self.drafter.aux_layers)

    def after(
        self, plan: StepPlan, inputs: StepInputs, aux_hidden_states: Sequence[Tensor], captured: CapturedStep | None
    ) -> Tensor | None:
        """See the protocol. After a replayed step this is captured, too, where that was possible."""
        bucket = None if self.graphs is None or captured is None else self.graphs.find(captured.bucket, plan.rows)
        if self.graphs is not None and bucket is not None:
            return self.graphs.replay(bucket)
        batch, wanting = inputs.forward, [i for i, row in enumerate(plan.rows) if row.wants_drafts > 0]
        prepared = None if captured is None else captured.prepared
        self.drafter.extend(
            TargetStep(
                tokens=batch.token_ids,
                next_tokens=self.tables.tokens[batch.row_ids, batch.positions + 1].clamp(min=0),
                positions=batch.positions,
                q_lens=batch.attention[0].q_lens,
                row_ids=batch.row_ids,
                aux_hidden_states=tuple(aux_hidden_states),
                metadata=ForwardMetadata(batch.positions, batch.slot_mappings, batch.attention, prepared),
                drafts_follow=bool(wanting),
            )
        )
        if not wanting:
            return None
        rows = self._rows(plan, inputs, wanting)
        return self.tables.write_drafts(rows.row_ids, rows.positions, propose(self.drafter, rows))

    def _rows(self, plan: StepPlan, inputs: StepInputs, wanting: Sequence[int]) -> DraftRows:
        """The rows that want drafts. (Rows of a bucket that the plan does not have are nobody's and want none.)"""
        q_starts = inputs.forward.attention[0].q_starts[:-1].to(torch.int64)
        row_ids, starts = inputs.row_ids, inputs.starts
        if len(wanting) != len(row_ids):
            index = upload(wanting, torch.int64, self.tables.device)
            q_starts, row_ids, starts = q_starts[index], row_ids[index], starts[index]
        positions = self.tables.computed[row_ids]
        return DraftRows(
            index=tuple(wanting),
            row_ids=row_ids,
            last=q_starts + (positions - starts) - 1,
            tokens=self.tables.tokens[row_ids, positions],
            positions=positions,
            lengths=tuple(plan.rows[i].max_end for i in wanting),
            num_draft_tokens=tuple(plan.rows[i].wants_drafts for i in wanting),
            sampled=Feature.SAMPLED in self.tables.features([plan.rows[i] for i in wanting]),
        )
