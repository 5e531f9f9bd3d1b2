"""``engine bench``: a load generator for any server that speaks the OpenAI API.

Latency counts from the moment a request was *due*, tokens are counted by the server's ``usage``, and a run
in which the client itself lagged is marked invalid. Every metric is defined in ``docs/metrics.md``.
"""
