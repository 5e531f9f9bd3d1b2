"""EAGLE3 (arXiv:2503.01840): one layer on the target's hidden states drafts token after token.

``checkpoint`` reads what the public formats say, ``drafter`` computes.
"""
