"""The engine's own loop, scheduler and allocator on a virtual clock, with a device that knows only what steps cost."""
