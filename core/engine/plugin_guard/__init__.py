"""The border between core and plugins: what a plugin raises carries its name, what it hands over is looked at once."""
