"""Choosing tokens on a GPU without the host: borders of the filters, Gumbel draws, penalties. In Triton."""
