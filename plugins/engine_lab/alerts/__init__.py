"""What is wrong with an engine, from its metrics: rules, for Prometheus and without it."""
