from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest

from engine.assembly import values
from engine.contracts.config import DrafterConfig, SlotConfig


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True)
class Outer(SlotConfig):
    colour: Colour = Colour.RED
    inner: Inner = field(default_factory=Inner)
    names: list[str] = field(default_factory=list)
    folder: Path = Path("here")


@dataclass(frozen=True, slots=True)
class Slotted(DrafterConfig):
    k: int = 3


PLAIN = {"colour": "red", "inner": {"depth": 1}, "names": [], "folder": "here"}


def test_enums_paths_and_nested_dataclasses_go_to_json_and_back():
    assert values.to_plain(Outer()) == PLAIN
    assert values.build(Outer, PLAIN) == Outer()


def test_fields_left_out_take_their_defaults_and_are_not_lost_afterwards():
    built = values.build(Outer, {"inner": {}})
    assert built == Outer() and values.to_plain(built) == PLAIN
    assert values.to_plain(values.build(Slotted, {"max_width": 1}))["k"] == 3


@pytest.mark.parametrize(
    ("given", "words"), [({"max_width": 99}, "drafter.max_width=99: expected 0 to 32"), ({"max_width": "x"}, "int")]
)
def test_a_refused_value_speaks_in_its_own_words(given, words):
    with pytest.raises(ValueError, match=words):
        values.build(DrafterConfig, given)


def test_an_object_is_found_by_its_path():
    assert values.load(values.class_path(DrafterConfig)) is DrafterConfig
    with pytest.raises(AttributeError):
        values.load("engine.contracts.config:Nothing")
