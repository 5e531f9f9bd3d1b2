"""``engine eval``: what a plan costs in quality, beside the same model unquantized, and what it saves in memory."""
