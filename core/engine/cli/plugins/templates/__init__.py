"""What ``engine plugins new`` writes: a folder for each slot with a plugin and its tests, as modules that work where
they are. In a new package the module, ``mine`` and ``Mine`` have other names.

They are plugins, not parts of the core: they import what plugins may import.
"""
