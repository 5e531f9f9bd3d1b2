"""Ways in which ranks exchange tensors. One rank starts none of them: it finds what they claim."""

from __future__ import annotations

from typing import Any

from engine_plugins.communicator.simulated import SimulatedCommunicator


class CapturableText(SimulatedCommunicator):
    """Says in words when it can be captured."""

    says = r"capturable is 'sometimes', expected bool"
    capturable: Any = "sometimes"


class SameBitsNumber(SimulatedCommunicator):
    """Says how many bits are the same."""

    says = r"same_bits is 24, expected bool"
    same_bits: Any = 24


class NoBroadcast(SimulatedCommunicator):
    """Lacks a call."""

    says = r"built a NoBroadcast, which is not a Communicator: it lacks broadcast"

    def __getattribute__(self, name: str) -> Any:
        if name == "broadcast":
            raise AttributeError(name)
        return super().__getattribute__(name)


class BegunRaises(SimulatedCommunicator):
    """Cannot say how many calls it has begun."""

    says = r"cannot be used: OSError: not yet"

    @property
    def begun(self) -> int:
        raise OSError("not yet")
