from engine.cli.plugins.templates.embedder.plugin import MineEmbedder, MineEmbedderConfig
from engine.testing.context import build_context
from engine.testing.embedder import EmbedderConformance


class TestMineEmbedder(EmbedderConformance):
    """What the core relies on, whatever a text means."""

    def make(self) -> MineEmbedder:
        return MineEmbedder(MineEmbedderConfig(), build_context())
