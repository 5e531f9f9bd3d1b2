"""``engine kv``: what stores keep, as people look at it, carry it elsewhere and remove it."""
