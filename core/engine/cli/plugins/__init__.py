"""``engine plugins``: what is installed, and ``new``, ``check`` and ``show`` for one plugin, one file each."""
