"""engine: an LLM inference server where every latency optimisation is a plugin."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from engine.serving.offline import LLM

__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from engine.serving.offline import LLM

        return LLM
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
