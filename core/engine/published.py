"""What the core offers to code outside of it: a change to these modules is a change to somebody else's code.

``tests/test_architecture_rules.py`` holds both lists.
"""

PLUGINS = (
    "engine.checkpoint",
    "engine.contracts",
    "engine.counters",
    "engine.hookspecs",
    "engine.kernels",
    "engine.kv.block_keys",
    "engine.native",
)
"""To plugins: packages and modules, with all that is in them."""
LAB = (
    *PLUGINS,
    "engine.assembly",
    "engine.kv",
    "engine.loop",
    "engine.machine",
    "engine.models",
    "engine.service",
    "engine.startup",
    "engine.step",
)
"""To ``engine_lab``, which plans, simulates and measures whole engines and is changed together with the core."""
