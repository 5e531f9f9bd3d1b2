"""From typed ops to callables: the fastest kernels this device has, or the chain of reference ops."""

from engine.execution.lowering.chain import lower_rotations
from engine.execution.lowering.dispatch import lower_head, lower_layer_op, op_norms, rope_kinds
from engine.execution.lowering.labels import describe
from engine.execution.lowering.rotation_tables import RotationTables
from engine.execution.lowering.settings import MOST_TOKENS, Kernels, LoweredHead, Lowering, replay_obstacle

__all__ = [
    "MOST_TOKENS",
    "Kernels",
    "LoweredHead",
    "Lowering",
    "RotationTables",
    "describe",
    "lower_head",
    "lower_layer_op",
    "lower_rotations",
    "op_norms",
    "replay_obstacle",
    "rope_kinds",
]
