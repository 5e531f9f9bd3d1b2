"""``engine sweep``: which of many plugin sets is the best for a load.

Hydra's sweep syntax names the sets; they are measured in passes, each set once a pass in a process of its own, and the
better half goes on (sequential halving; Karnin, Koren and Somekh, 2013). The last round alone decides.
"""
