"""Environment variables that libraries read once, when they are loaded, and that make CPU inference faster.

They are set for the engine process, never over what the user has set.
"""

from __future__ import annotations

from collections.abc import Mapping

CPU_DEFAULTS: Mapping[str, str] = {
    # torch asks the kernel for huge pages for large tensors: weights are streamed once per token, and with 4 KiB
    # pages a good part of that time goes into address translation.
    "THP_MEM_ALLOC_ENABLE": "1",
    # Kernels have threads of their own. Those of torch's OpenMP library compute little beside them, and would stay
    # awake on the same cores for milliseconds after it.
    "GOMP_SPINCOUNT": "2000",
}


def with_defaults(environment: Mapping[str, str], device: str) -> dict[str, str]:
    """``environment`` with what is missing for an engine on this device."""
    return {**(CPU_DEFAULTS if device == "cpu" else {}), **environment}
