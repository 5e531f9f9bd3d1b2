"""Check and measure the engine on one GPU. Run it as ``python tools/gpu_check``; see ``__main__.py``."""
