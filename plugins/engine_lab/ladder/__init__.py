"""``engine ladder``: what each optimisation changes, added one by one and left out one by one.

Both sides of a comparison take turns in pairs of runs; the estimate is Hodges-Lehmann's of the runs' log ratios.
"""
