from engine.cli.plugins.templates.kv_store.plugin import MineStore, MineStoreConfig
from engine.testing.context import build_context
from engine.testing.kv_store import KVStoreConformance


class TestMineStore(KVStoreConformance):
    """What the core relies on before it fills blocks with records."""

    def make(self) -> MineStore:
        return MineStore(MineStoreConfig(), build_context())
