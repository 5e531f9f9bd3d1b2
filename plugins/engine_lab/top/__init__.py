"""``engine top``: a running engine, every second.

``poll`` asks the engine, ``frame`` computes what happened between two answers, ``render`` lays it out, ``main`` repeats
that until somebody leaves.
"""
