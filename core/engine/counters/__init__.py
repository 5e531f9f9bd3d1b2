"""What the engine counts of itself: each metric is declared once, and kept whatever exporters there are.

``GET /engine/counters`` answers with the readings as JSON. Exporters render or send them
(:class:`engine.contracts.exporter.CountersExporter`); commands and the page read the JSON.
"""
