"""``engine eval``: what a plan costs in quality, by :mod:`engine.evaluation`."""
