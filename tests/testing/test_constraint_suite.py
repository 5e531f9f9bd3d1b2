"""The suite of constraints is of the kinds of grammars that a plugin follows."""

from __future__ import annotations

import pytest

from engine.contracts.model import DeviceFacts
from engine.testing.constraint import CASES, suite_for
from engine.testing.subject import Subject
from engine.testing.trial import Trial


@pytest.mark.parametrize(
    ("factory", "kinds"),
    [
        ("engine_plugins.constraint.llguidance:LLGuidance", tuple(CASES)),
        ("engine.cli.plugins.templates.constraint.plugin:MineConstraint", ("choice",)),
    ],
)
def test_the_suite_of_a_plugin_is_of_the_kinds_that_it_compiles(factory: str, kinds: tuple[str, ...]) -> None:
    config = f"{factory}Config"
    trial = Trial("constraint", "mine", factory, config, {}, (), DeviceFacts("cpu"))
    assert suite_for(Subject(trial)).kinds == kinds
