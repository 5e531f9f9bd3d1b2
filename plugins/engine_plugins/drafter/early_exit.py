"""Self-speculation: the target's own first layers and its own head draft; all its layers verify.

No weights, no training, no cache of its own: the first layers' keys are the target's, and the verification writes the
same ones again. How well it drafts depends on how early the model has made up its mind; models trained for it do best
(LayerSkip, arXiv:2404.16710).
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from engine.contracts.drafter import DraftEngine, DrafterKV, DraftLayers, DraftRows, DraftTokens, TargetStep
from engine.contracts.provider import BuildContext
from engine_plugins.drafter.config import EarlyExitConfig


class EarlyExitDrafter:
    """Drafts with the first ``layers`` of the target."""

    placement: Literal["host", "device"] = "device"
    capturable = True
    aux_layers: tuple[int, ...] = ()
    kv_lookahead = 0
    weights_bytes = 0

    def __init__(self, config: EarlyExitConfig, context: BuildContext) -> None:
        total = context.model.num_layers
        if config.layers >= total:
            raise ValueError(f"drafter.layers={config.layers}: expected less than the model's {total}")
        self.max_width = config.max_width
        self._num_layers = config.layers or max(1, total // 4)
        self.kv: DrafterKV | None = DrafterKV(shared_layers=self._num_layers)

    def start(self, engine: DraftEngine) -> None:
        self._engine = engine
        self._layers: DraftLayers = engine.target_layers(self._num_layers)
        self._chain = engine.chain(self._next)

    def extend(self, step: TargetStep) -> None:
        """The target has written these layers' keys."""

    def propose(self, rows: DraftRows) -> DraftTokens:
        return self._chain(rows)

    def _next(self, tokens: Tensor, hidden: Tensor | None, metadata: Any) -> tuple[Tensor, None]:
        entering = self._engine.enter(tokens)
        return self._engine.head(self._layers.run(*entering, metadata=metadata)), None

    def release(self, row_id: int) -> None:
        """Nothing is kept."""
