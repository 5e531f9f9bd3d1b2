"""Paged attention in C++: one call per layer, with AMX where there is; ``attention.cpp`` tells how it works."""
