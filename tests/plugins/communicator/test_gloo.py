from engine.contracts.config import CommunicatorConfig
from engine.testing.communicator import CommunicatorConformance
from engine.testing.context import build_context
from engine_plugins.communicator.gloo import GlooCommunicator


class TestInThreads(CommunicatorConformance):
    soon_s = 2.0
    can_abort = False

    def make(self) -> GlooCommunicator:
        return GlooCommunicator(CommunicatorConfig(), build_context())
