from engine.cli.plugins.templates.exporter.plugin import MineExporter, MineExporterConfig
from engine.testing.context import build_context
from engine.testing.exporter import ExporterConformance


class TestMineExporter(ExporterConformance):
    """What the core relies on, whatever becomes of the events."""

    def make(self) -> MineExporter:
        return MineExporter(MineExporterConfig(), build_context())
