from engine.cli.plugins.templates.drafter.plugin import MineDrafter, MineDrafterConfig
from engine.testing.context import build_context
from engine.testing.drafter import HostDrafterConformance


class TestMineDrafter(HostDrafterConformance):
    """What the core relies on. A drafter on the device inherits ``DeviceDrafterConformance``."""

    history = (5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7)
    """Tokens that the drafter should have something to say about."""

    def make(self) -> MineDrafter:
        return MineDrafter(MineDrafterConfig(), build_context())
