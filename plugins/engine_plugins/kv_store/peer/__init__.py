"""Records of other engines, over TCP."""
