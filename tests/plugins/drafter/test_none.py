from engine.contracts.config import DrafterConfig
from engine.testing.drafter import HostDrafterConformance
from engine_plugins.drafter.none import NoDrafter


class TestNoDrafterConformance(HostDrafterConformance):
    def make(self):
        return NoDrafter(DrafterConfig(), None)


def test_no_draft_tokens_switches_speculation_off():
    assert NoDrafter(DrafterConfig(max_width=4), None).max_width == 0
