from engine.cli.plugins.templates.router.plugin import MineRouter, MineRouterConfig
from engine.testing.context import build_context
from engine.testing.router import RouterConformance


class TestMineRouter(RouterConformance):
    """What the core relies on, wherever requests go."""

    def make(self) -> MineRouter:
        return MineRouter(MineRouterConfig(), build_context())
