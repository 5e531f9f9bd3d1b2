"""The command line: ``engine SUBCOMMAND [--flags] [overrides]``, one file per subcommand."""
