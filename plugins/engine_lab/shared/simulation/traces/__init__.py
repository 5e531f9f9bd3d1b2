"""Readers of traces: one file for each format, all of them giving
:class:`~engine_lab.shared.simulation.trace.TraceRequest`."""
