"""``engine doctor``: why a running engine is slow, what to change, and by how much that should help.

Figures of three windows go through a table of rules; only what all three windows say is a finding.
"""
