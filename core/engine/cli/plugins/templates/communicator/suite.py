from engine.cli.plugins.templates.communicator.plugin import MineCommunicator, MineCommunicatorConfig
from engine.testing.communicator import CommunicatorConformance
from engine.testing.context import build_context


class TestMineCommunicator(CommunicatorConformance):
    """What the core relies on. One with native functions for a CPU inherits ``NativeConformance`` instead."""

    def make(self) -> MineCommunicator:
        return MineCommunicator(MineCommunicatorConfig(), build_context())
