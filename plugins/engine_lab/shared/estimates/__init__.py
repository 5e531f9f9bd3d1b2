"""What steps would take on devices that are not here: estimates from the graphs of ranks and stated figures.

``devices`` says what a device is, ``collectives`` what exchanges between devices take, as published or measured,
``efficiency`` what no data sheet states, and ``steps`` puts them and the work of :mod:`engine.models.work` together.
Every figure has its source; every result is an estimate. Torch-free; nothing is loaded or started.
"""
