"""From a plan to an engine that is ready: plugins, memory, weights, warm-up, and the process it runs in."""
