"""What a plugin raises says whose it is, whatever the plugin is made of."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import pytest

from engine.contracts import scheduler
from engine.contracts.quantizer import Quantizer
from engine.contracts.scheduler import Schedule
from engine.plugin_guard.calls import (
    PluginError,
    by_plugin,
    contract_error,
    describe_error,
    error_line,
    lacking,
    name_of,
    named,
    noting,
    quote,
)

WHO = "quantizer=mine (from engine-mine 0.3.0)"


class Slot(Protocol):
    def ask(self) -> Any: ...

    def tell(self) -> Any: ...


class Plain:
    def __init__(self) -> None:
        self.asked = 0

    def ask(self, error: BaseException | None = None) -> int:
        self.asked += 1
        if error is not None:
            raise error
        return self.asked

    def tell(self) -> int:
        return self.ask(KeyError("inner"))

    def other(self) -> None:
        raise ValueError("not of the contract")


class Slots:
    __slots__ = ("asked",)

    def ask(self, error: BaseException) -> None:
        raise error


@dataclass(frozen=True, slots=True)
class Frozen:
    number: int = 3

    def ask(self, error: BaseException) -> None:
        raise error


class Static:
    @staticmethod
    def ask(error: BaseException) -> None:
        raise error


class OfTheClass:
    @classmethod
    def ask(cls, error: BaseException) -> None:
        raise error


class OfTheInstance:
    def __init__(self) -> None:
        def ask(error: BaseException) -> None:
            raise error

        self.ask = ask


class Derived(Plain):
    def ask(self, error: BaseException | None = None) -> int:
        return super().ask(error)


class Abstract(ABC):
    @abstractmethod
    def ask(self, error: BaseException) -> None: ...


class Concrete(Abstract):
    def ask(self, error: BaseException) -> None:
        raise error


class FromProtocol(Slot):
    def ask(self, error: BaseException | None = None) -> None:
        if error is not None:
            raise error

    def tell(self) -> None: ...


KINDS = [Plain, Slots, Frozen, Static, OfTheClass, OfTheInstance, Derived, Concrete, FromProtocol]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_method_raises_keeps_its_type_and_names_the_plugin(kind: type[Any]) -> None:
    plugin = kind()
    assert named(plugin, WHO, (Slot,)) is plugin and isinstance(plugin, kind) and name_of(plugin) == WHO
    with pytest.raises(RuntimeError) as raised:
        plugin.ask(RuntimeError("boom"))
    line = "(test_calls.py:"
    assert describe_error(raised.value).startswith(f"{WHO}: ask() raised RuntimeError: boom {line}")
    assert by_plugin(raised.value)


def test_what_ends_the_process_becomes_an_error() -> None:
    plugin = named(Plain(), WHO, (Slot,))

    class Odd(BaseException):
        pass

    for stop, said in ((SystemExit(3), "SystemExit: 3"), (Odd(), "Odd")):
        with pytest.raises(PluginError, match=said) as raised:
            plugin.ask(stop)
        assert raised.value.__cause__ is stop
    with pytest.raises(KeyboardInterrupt):
        plugin.ask(KeyboardInterrupt())


def test_the_innermost_call_is_told_and_the_traceback_has_both() -> None:
    plugin = named(Plain(), WHO, (Slot,))
    with pytest.raises(KeyError) as raised:
        plugin.tell()
    assert describe_error(raised.value).startswith(f"{WHO}: ask() raised KeyError: 'inner'")
    assert raised.value.__notes__ == [f"{WHO}: ask()", f"{WHO}: tell()"]


def test_a_plugin_works_as_before() -> None:
    plugin = named(Plain(), WHO, (Slot,))
    assert (plugin.ask(), plugin.ask(), plugin.asked) == (1, 2, 2)
    with pytest.raises(ValueError) as raised:
        plugin.other()
    assert not by_plugin(raised.value) and describe_error(raised.value) == "ValueError: not of the contract"


def test_a_class_that_cannot_be_derived_from_is_left_alone_and_named_by_its_callers() -> None:
    class Final:
        def __init_subclass__(cls) -> None:
            raise TypeError("this class is final")

        def ask(self) -> None:
            raise RuntimeError("boom")

    plugin = named(Final(), WHO, (Slot,))
    assert type(plugin) is Final and name_of(plugin) == WHO
    with pytest.raises(RuntimeError) as raised:
        plugin.ask()
    assert describe_error(raised.value, plugin, "ask").startswith(f"{WHO}: ask() raised RuntimeError: boom")


def test_two_plugins_of_one_class_have_names_of_their_own() -> None:
    one, other, unnamed = named(Plain(), "a", (Slot,)), named(Plain(), "b", (Slot,)), Plain()
    assert (name_of(one), name_of(other), name_of(unnamed)) == ("a", "b", "Plain")


def test_functions_of_all_kinds_can_be_named() -> None:
    class Callable:
        def __call__(self, x: int) -> float:
            return 1 / x

    for function in (lambda x: 1 / x, functools.partial(lambda y, x: y / x, 1), Callable()):
        call = noting(function, f"{WHO}: apply()")
        assert call(1) == 1
        with pytest.raises(ZeroDivisionError) as raised:
            call(0)
        assert describe_error(raised.value).startswith(f"{WHO}: apply() raised ZeroDivisionError")


def test_an_empty_assertion_says_where() -> None:
    def apply() -> None:
        raise AssertionError

    with pytest.raises(AssertionError) as raised:
        noting(apply, f"{WHO}: apply()")()
    assert describe_error(raised.value).startswith(f"{WHO}: apply() raised AssertionError (test_calls.py:")


def test_a_value_in_a_message_is_short_and_on_one_line() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise RuntimeError

    assert quote("a\nb") == "'a\\nb'" and len(quote("x" * 1000)) < 130 and "Bad" in quote(Bad())
    assert str(contract_error(Plain(), "pack", "returned 3")) == "Plain: pack() returned 3"


@pytest.mark.parametrize(
    ("source", "is_ours"), [("engine.contracts.quantizer", True), ("engine.gone", True), ("json", False)]
)
def test_a_name_that_the_engine_no_longer_has_leads_to_its_changelog(source, is_ours):
    with pytest.raises(ImportError) as raised:
        exec(f"from {source} import NotThere")  # noqa: S102
    assert ("CHANGELOG.md says what changed for plugins" in error_line(raised.value)) == is_ours


@pytest.mark.parametrize(
    ("use", "is_ours"),
    [
        (lambda: Schedule(()).turn, True),
        (lambda: scheduler.turn, True),
        (lambda: "text".turn, False),
    ],
    ids=["attribute", "module", "attribute-of-others"],
)
def test_an_attribute_that_the_engine_no_longer_has_leads_to_its_changelog(use, is_ours):
    with pytest.raises(AttributeError) as raised:
        use()
    assert ("CHANGELOG.md says what changed for plugins" in describe_error(raised.value, Plain(), "plan")) == is_ours


def test_a_plugin_that_lacks_a_method_is_led_to_the_changelog():
    assert lacking(Plain(), Quantizer).startswith("it lacks format, lossless, pack, stored; the engine's CHANGELOG.md")
