"""Paged attention in C++: one call per layer, with AMX where there is; ``paged_attention.h`` tells how it works."""
