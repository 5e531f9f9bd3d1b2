"""Who runs a step, with how many tokens."""
