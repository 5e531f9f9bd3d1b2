"""Paged attention in Triton: one split-KV kernel for decode and verification, one for long prefill chunks."""
