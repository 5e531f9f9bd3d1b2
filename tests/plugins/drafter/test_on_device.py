"""Drafters that run after the target: no token changes, whatever is drafted."""

from engine.testing.drafter import DeviceDrafterConformance


class TestEarlyExit(DeviceDrafterConformance):
    overrides = ("drafter=early_exit", "drafter.layers=3")


class TestDraftModel(DeviceDrafterConformance):
    overrides = ("drafter=draft_model", "drafter.path=bundled")
