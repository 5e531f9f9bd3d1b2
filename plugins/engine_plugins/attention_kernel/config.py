"""What the built-in attention kernels need (readable without importing torch or Triton)."""

from __future__ import annotations

TRITON_CAPABILITY = (8, 0)
"""Least CUDA compute capability: the tiles are laid out for its shared memory and asynchronous copies."""
TRITON_HEAD_DIMS = tuple(range(8, 257, 8))
