"""Imported once by the server that processes of ranks are forked from: what takes long and starts no thread."""

import torch
from tests.plugins.communicator import jobs, makes

from engine.native import find_compiler
from engine_plugins.communicator.shm.communicator import kernels

__all__ = ["jobs", "makes", "torch"]

if not isinstance(find_compiler(), str):
    kernels()
