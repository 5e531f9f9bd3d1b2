"""Quantized weights on GPUs: tile layouts, kernels that read them, and what runs for how many rows."""
