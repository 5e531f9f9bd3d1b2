from engine.cli.plugins.templates.scheduler.plugin import MineScheduler, MineSchedulerConfig
from engine.testing.context import build_context
from engine.testing.scheduler import BLOCK, SchedulerConformance


class TestMineScheduler(SchedulerConformance):
    """What the core relies on, whatever the order that you choose."""

    def make(self) -> MineScheduler:
        return MineScheduler(MineSchedulerConfig(), build_context(BLOCK))
