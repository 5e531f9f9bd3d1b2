"""Linear layers on CPUs: weights in panels of 16 outputs, multiplied as they are stored."""
