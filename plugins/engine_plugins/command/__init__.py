"""Subcommands of ``engine``."""
