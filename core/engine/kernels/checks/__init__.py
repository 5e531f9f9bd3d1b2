"""What plugins make, tried once before the engine computes with it: types, shapes, memory, and the value itself where
its definition is cheap. What fails raises :class:`~engine.plugin_guard.calls.PluginError`, which names plugin and
call.
"""
