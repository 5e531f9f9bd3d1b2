"""What crosses the border between the core and its plugins: one file per slot, one for subcommands, and the
plain data they share.

Nothing here imports torch, hydra or a plugin, so a plugin's metadata can be read in milliseconds.
Tensors appear in annotations only (``TYPE_CHECKING``).
"""

SLOTS: tuple[str, ...] = (
    "architecture",
    "parallelism",
    "communicator",
    "quantizer",
    "kv_format",
    "kv_allocator",
    "attention_kernel",
    "drafter",
    "scheduler",
    "router",
    "exporter",
)
"""Every slot, in the order in which the core builds them."""

MULTI_SLOTS: frozenset[str] = frozenset({"exporter"})
"""Slots that take any number of plugins; all others take exactly one."""

API_SLOTS: frozenset[str] = frozenset({"router", "exporter"})
"""Slots whose plugins live in the API process; all others live in the engine process."""
