"""The files of a checkpoint, which may come from anyone: opened, bounded and checked before they are believed.

Free of torch. Plugins may import it.
"""
