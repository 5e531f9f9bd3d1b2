"""``engine calibrate``: how often a smaller model's answers agree with a larger one's, by its confidence."""
