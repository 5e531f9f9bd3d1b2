"""Model families as typed ops."""
