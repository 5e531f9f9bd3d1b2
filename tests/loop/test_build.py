"""Plans that bind but cannot run are refused while the engine is built, with the plugin's name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.contracts.drafter import DrafterKV
from engine.loop.build import DoesNotFit, check_drafter
from engine_plugins.drafter.early_exit import EarlyExitDrafter


def test_a_drafter_that_asks_for_what_the_model_has_not_is_refused_by_name() -> None:
    plan = assemble(["model.path=bundled", "device=cpu", "drafter=early_exit", "attention_kernel=torch"])
    bound = bind(plan)
    check_drafter(plan, bound)
    assert isinstance(bound.drafter, EarlyExitDrafter)
    bound.drafter.taps = (2, 7)
    bound.drafter.kv = DrafterKV(shared_layers=7)
    with pytest.raises(DoesNotFit, match=r"drafter=early_exit .*tap 7, .*layers 0 to 6; the first 7 layers"):
        check_drafter(plan, bound)
    bound.drafter.taps, bound.drafter.kv = (), DrafterKV(num_layers=1, num_kv_heads=1, head_dim=48)
    kernel = bound.attention_kernel
    kernel.capabilities = replace(kernel.capabilities, head_dims=(64, 128))
    with pytest.raises(DoesNotFit, match="heads of 48, the attention kernel has 64, 128"):
        check_drafter(plan, bound)
