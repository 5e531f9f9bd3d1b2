"""How a cached key or value is stored."""
