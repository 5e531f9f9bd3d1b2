from engine.contracts.config import CommunicatorConfig
from engine.testing.communicator import CommunicatorConformance
from engine.testing.context import build_context
from engine_plugins.communicator.simulated import SimulatedCommunicator


class TestSimulated(CommunicatorConformance):
    sizes = (2, 3, 4)

    def make(self) -> SimulatedCommunicator:
        return SimulatedCommunicator(CommunicatorConfig(), build_context())
