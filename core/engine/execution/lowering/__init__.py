"""From typed ops to callables: the fastest kernels this device has, or the chain of reference ops."""

from engine.execution.lowering.chain import lower_rotations
from engine.execution.lowering.dispatch import lower_head, lower_layer_op, op_norms, rope_kinds
from engine.execution.lowering.labels import describe
from engine.execution.lowering.recorder import Memory, record
from engine.execution.lowering.recordings import NotRecorded, Recordings, Table
from engine.execution.lowering.replay import (
    MOST_TOKENS,
    ReplayedLayers,
    Where,
    can_replay,
    lower_replay,
    replay_obstacle,
    run_layer,
    run_layers,
)
from engine.execution.lowering.rotation_tables import RotationTables
from engine.execution.lowering.settings import Kernels, LoweredHead, Lowering

__all__ = [
    "MOST_TOKENS",
    "Kernels",
    "LoweredHead",
    "Lowering",
    "Memory",
    "NotRecorded",
    "Recordings",
    "ReplayedLayers",
    "RotationTables",
    "Table",
    "Where",
    "can_replay",
    "describe",
    "lower_head",
    "lower_layer_op",
    "lower_replay",
    "lower_rotations",
    "op_norms",
    "record",
    "replay_obstacle",
    "rope_kinds",
    "run_layer",
    "run_layers",
]
