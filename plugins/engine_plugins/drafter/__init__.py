"""What might come next."""
