"""``engine bench-machine``: how fast this machine reads memory and multiplies, and which instructions the engine takes.

These rates are the floors of everything else: a decode step reads the weights once, a prompt multiplies with them.
"""
