"""Collectives through memory that the ranks of one machine share."""
