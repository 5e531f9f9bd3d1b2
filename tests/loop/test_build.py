"""Plans that bind but cannot run are refused while the engine is built, with the plugin's name."""

from __future__ import annotations

import pytest

from engine.contracts.drafter import DrafterKV
from engine.loop.build import DoesNotFit, check_drafter
from engine.testing.context import build_context
from engine_plugins.drafter.config import NoDrafterConfig
from engine_plugins.drafter.none import NoDrafter


def test_a_drafter_that_wants_its_own_cache_is_refused_by_name() -> None:
    drafter = NoDrafter(NoDrafterConfig(), build_context())
    check_drafter("mine", drafter)
    drafter.kv = DrafterKV(num_layers=1, num_kv_heads=2, head_dim=64)
    with pytest.raises(DoesNotFit, match="drafter=mine wants a KV cache"):
        check_drafter("mine", drafter)
