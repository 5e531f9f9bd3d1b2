"""Speculation: how many tokens to draft, and running the layers of drafters on the device."""
