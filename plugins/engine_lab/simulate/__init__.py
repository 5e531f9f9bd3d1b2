"""``engine simulate``: what latencies an engine would have under the load of a trace, and which of several would win.

The engine's own scheduler, KV allocator and drafting policy run on a virtual clock; steps take what was measured.
"""
