"""``engine eval``: what a plan costs in quality, beside the same model unquantized, and what it saves in memory.

``options`` reads the command line, ``plans`` assembles what is compared, ``windows`` and ``questions`` read the user's
text, ``forward`` runs a loaded plan over a window, ``scoring`` sums up, ``capacity`` asks the memory ledger, and
``report`` judges and prints, ``output`` writes. ``errors`` says what is the user's to change and what broke.
"""
