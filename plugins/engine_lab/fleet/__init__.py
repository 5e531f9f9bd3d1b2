"""``engine fleet``: the engines behind a listener, and changes of them while it serves."""
