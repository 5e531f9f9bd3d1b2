"""The built-in plugins: one folder per slot, one file (or folder) per plugin."""
