"""engine: an LLM inference server where every latency optimisation is a plugin."""

import warnings
from typing import TYPE_CHECKING, Any

from engine.version import VERSION as __version__

# torch takes numpy for required when it is imported; nothing here uses it.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)

if TYPE_CHECKING:
    from engine.service.offline import LLM

__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from engine.service.offline import LLM

        return LLM
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
