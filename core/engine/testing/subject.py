"""A plugin that a suite tries, and how a suite's test class is made for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import yaml

from engine.assembly import values
from engine.assembly.errors import listing, nearest
from engine.contracts.provider import BuildContext
from engine.contracts.slots import SLOTS
from engine.testing.context import build_context
from engine.testing.trial import Trial

T = TypeVar("T")
Suite = type[Any]


class CannotRun(Exception):
    """The trial asks for something that there is not; the text says what."""


class Subject:
    """A plugin that can be built as often as a suite wants it."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.device = trial.settings.get("device", trial.device.kind)

    def context(self, block_size: int = 16) -> BuildContext:
        trial = self.trial
        return build_context(block_size, device=trial.device, dtype=trial.dtype, execution=trial.execution)

    def build(self, context: BuildContext | None = None, **changes: Any) -> Any:
        """A fresh plugin. Raises whatever it raises."""
        config = values.build(values.load(self.trial.config_class), self.trial.config | changes)
        factory = values.load(self.trial.factory)
        return factory(config) if self.trial.slot == "architecture" else factory(config, context or self.context())

    @staticmethod
    def tried(ask: Callable[..., T], *args: Any) -> T | None:
        """What a plugin says of itself; ``None`` where it raises: the tests then do, and say what."""
        try:
            return ask(*args)
        except Exception:
            return None


class ContractSuite:
    """For slots that have no suite."""

    subject: Subject

    def test_what_is_built_fulfils_the_contract(self) -> None:
        protocol = SLOTS[self.subject.trial.slot].protocol
        built = self.subject.build()
        missing = [name for name in dir(protocol) if not name.startswith("_") and not hasattr(built, name)]
        assert not missing, f"{type(built).__name__} lacks {', '.join(missing)} of {protocol.__name__}"
        assert isinstance(built, protocol)


def contract_suite(subject: Subject, note: str = "this slot has no suite: only what was built was looked at") -> Suite:
    return filled(subject, [ContractSuite], subject=subject, _note=note)


def filled(subject: Subject, suites: Iterable[Suite], /, **members: Any) -> Suite:
    """A test class of these suites with further members, and the attributes that the user set."""
    if any("device" in vars(base) for suite in suites for base in suite.__mro__):
        members = {"device": subject.device} | members
    made = type("TestPlugin", tuple(suites), {"__module__": __name__} | members)
    return with_settings(made, subject.trial.settings)


def with_settings(suite: Suite, settings: dict[str, str]) -> Suite:
    known = settable(suite)
    members = {}
    for key, text in settings.items():
        if key not in known:
            raise CannotRun(
                f"--set {key}={text}: the suite has no such attribute{nearest(key, known)} "
                f"(attributes: {listing(known)})"
            )
        members[key] = _typed(key, text, known[key])
    return type("TestPlugin", (suite,), {"__module__": __name__} | members)


def settable(suite: Suite) -> dict[str, Any]:
    """Attributes of a suite that are plain values."""
    found = {key: value for base in reversed(suite.__mro__) for key, value in vars(base).items()}
    plain = (str, int, float, tuple)
    return {key: value for key, value in found.items() if isinstance(value, plain) and not key.startswith("_")}


def _typed(key: str, text: str, now: Any) -> Any:
    """``text`` as YAML, of the type that the attribute has now."""
    kind: Any = type(now)
    if isinstance(now, tuple):
        kind = list[type(now[0])] if now else list  # type: ignore[misc]
    try:
        value = msgspec.convert(yaml.safe_load(text), kind)
        return tuple(value) if isinstance(now, tuple) else value
    except (msgspec.ValidationError, yaml.YAMLError) as error:
        first = str(error).splitlines()[0].replace("Expected", "expected")
        raise CannotRun(f"--set {key}={text}: {first} (it is {now!r})") from error
