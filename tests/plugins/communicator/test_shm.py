from engine.contracts.config import CommunicatorConfig
from engine.testing.communicator import NativeConformance
from engine.testing.context import build_context
from engine_plugins.communicator.shm.communicator import SharedMemoryCommunicator


class TestInThreads(NativeConformance):
    sizes = (2, 3, 4)

    def make(self) -> SharedMemoryCommunicator:
        return SharedMemoryCommunicator(CommunicatorConfig(), build_context())
