"""What crosses the border between the core and its plugins: one file per slot, one for subcommands, and the
plain data they share.

Nothing here imports torch, hydra or a plugin, so a plugin's metadata can be read in milliseconds.
Tensors appear in annotations only (``TYPE_CHECKING``).
"""
