"""The built-in plugins: one folder per slot and one for subcommands, one file (or folder) per plugin."""
