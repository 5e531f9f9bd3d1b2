"""Communicators for the tests of this folder."""

from __future__ import annotations

from engine.contracts.config import CommunicatorConfig
from engine.testing.context import build_context
from engine_plugins.communicator.gloo import GlooCommunicator
from engine_plugins.communicator.shm.communicator import SharedMemoryCommunicator
from engine_plugins.communicator.simulated import SimulatedCommunicator


def simulated() -> SimulatedCommunicator:
    return SimulatedCommunicator(CommunicatorConfig(), build_context())


def shm() -> SharedMemoryCommunicator:
    return SharedMemoryCommunicator(CommunicatorConfig(), build_context())


def gloo() -> GlooCommunicator:
    return GlooCommunicator(CommunicatorConfig(), build_context())
