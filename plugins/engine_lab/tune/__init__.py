"""``engine tune``: the plugin set for a service-level objective, proven against the one that is there.

A sweep chooses; a round of fresh runs compares what was chosen with the baseline, and with itself without each of its
lines.
"""
