"""A rule: one possible cause, and how to recognise it. The rules are in ``rules/``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine_lab.doctor.evidence import Engine, Figures
from engine_lab.doctor.figures import machine_of

SERVER, MACHINE, CLIENTS, BETWEEN = "the server", "the machine", "the clients", "between server and clients"
"""Where a cause is: what has to change."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to change and what that should do to the rule's metric."""

    low: float
    """Predicted metric after the change / before, best case."""
    high: float
    """Worst case. A change that leaves the metric above it was not to the cause."""
    overrides: tuple[str, ...] = ()
    """Of the engine; none where only client or prompt can change."""
    advice: str = ""
    pays: str = ""
    """Who waits longer for it, for what, and how much; empty: nobody."""
    is_trade: bool = False
    """A class of requests is expected to get a P95 that is more than a tenth worse: not to be done unasked."""
    change: str = ""
    """Of the load, one of :data:`engine_lab.doctor.replay.CHANGES`: what the advice comes to, as far as it can be
    tried."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high < 1.0:
            raise ValueError(f"a remedy predicts {self.low:g} to {self.high:g} of its metric: expected less than 1")


@dataclass(frozen=True, slots=True)
class Rule:
    """Recognises a cause in the figures of one window."""

    cause: str
    """Its published name."""
    branch: str
    """The node of the decision tree that leads to it."""
    says: str
    """What is wrong, a sentence."""
    metric: str
    """The figure that the remedy lowers; a time if its name ends with ``_ms``."""
    shown: tuple[str, ...]
    """Figures that are the evidence."""
    look: Callable[[Engine, Figures], Remedy | None]
    """``None``: these figures do not show the cause. Only called where :attr:`needs` are met."""
    needs: Mapping[str, float] = field(default_factory=dict)
    """Precondition: figures and the least each must be for the window to say anything."""
    comes_first: bool = False
    """Before all others: they may be consequences."""
    where: str = SERVER
    """Whose fault it is."""

    @property
    def reads_costs(self) -> bool:
        """Whether it reasons with the step cost."""
        return any(name.startswith("cost.") for name in self.shown)

    @property
    def is_time(self) -> bool:
        return self.metric.endswith("_ms")

    def can_judge(self, figures: Figures) -> bool:
        """A step cost that was measured while others had the cores says nothing of plugins."""
        known = all(name in figures for name in (self.metric, *self.shown))
        if self.reads_costs and machine_of(figures).is_busy:
            return False
        return known and all(figures.get(name, 0.0) >= least for name, least in self.needs.items())
