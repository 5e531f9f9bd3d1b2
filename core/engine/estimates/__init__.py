"""What a step would take on devices that are not here: estimates from the graphs of ranks and stated figures.

``devices`` says what a device is, ``collectives`` what exchanges between them take, as published, ``steps`` puts the
work of :mod:`engine.models.work` and both together, and ``fit`` finds what no data sheet states from measured steps.
Every figure has its source, and every result is an estimate. Torch-free; nothing is loaded or started.
"""
