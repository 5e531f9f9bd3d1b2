"""The border between core and plugins: what a plugin raises carries its name, and what it hands over is checked once."""
