"""Launcher ``ray``: Ray finds the machines and starts the workers there; nothing else passes through it."""
