"""What several commands need: flags, output, reading a running engine, statistics, sizes of plans, simulation."""
