"""From typed ops to callables: the fastest kernels this device has, or the chain of reference ops."""

from engine.kernels.cpu.rotation_tables import RotationTables
from engine.kernels.dispatch import lower_head, lower_layer_op, rope_kinds
from engine.kernels.labels import describe
from engine.kernels.settings import MOST_TOKENS, Kernels, LoweredHead, Lowering, replay_obstacle
from engine.kernels.torch.chain import lower_rotations

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
    "replay_obstacle",
    "rope_kinds",
]
