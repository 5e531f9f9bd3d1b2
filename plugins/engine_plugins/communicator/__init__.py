"""Communicators: how ranks exchange tensors."""
