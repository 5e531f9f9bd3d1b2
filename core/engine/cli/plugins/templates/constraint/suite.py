from engine.cli.plugins.templates.constraint.plugin import MineConstraint, MineConstraintConfig
from engine.testing.constraint import ConstraintConformance


class TestMineConstraint(ConstraintConformance):
    """What the core relies on, whatever is followed."""

    kinds = ("choice",)

    def make(self) -> MineConstraint:
        return MineConstraint(MineConstraintConfig(), self.context())
