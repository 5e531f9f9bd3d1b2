"""The machine itself: what computes beside the engine."""

from __future__ import annotations

from engine_lab.doctor.evidence import Engine, Figures
from engine_lab.doctor.figures import machine_of
from engine_lab.doctor.rule import MACHINE, Remedy, Rule


def busy(engine: Engine, figures: Figures) -> Remedy | None:
    """Threads that compute together wait for the one without a core, so that steps may gain more than it waited."""
    if not machine_of(figures).is_busy:
        return None
    advice = (
        "End or move what else computes on this machine, or give the engine cores of its own (taskset, a CPU limit for "
        "others); on a virtual machine with steal, other ones compute. No plugin mends this."
    )
    return Remedy(0.1, min(0.98, 1.0 - 0.5 * figures["waiting_for_core"]), (), advice)


RULES = (
    Rule(
        "machine_busy",
        "is a core free?",
        "The machine is busy: the engine's threads wait for cores that others use.",
        "step_ms",
        ("waiting_for_core", "others_cpus", "stolen_share"),
        busy,
        {"steps": 1.0},
        comes_first=True,
        where=MACHINE,
    ),
)
