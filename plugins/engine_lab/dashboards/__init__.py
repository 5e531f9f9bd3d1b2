"""Grafana dashboards over the metrics of exporter ``prometheus``."""
