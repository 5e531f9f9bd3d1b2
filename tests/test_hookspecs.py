import ast
import inspect
import textwrap

import pytest

from engine import hookspecs
from engine.contracts import API_SLOTS, MULTI_SLOTS, SLOTS
from engine.contracts.config import SLOT_CONFIGS
from engine.contracts.provider import PLUGIN_API

HOOKS = {name: value for name, value in vars(hookspecs).items() if name.startswith("engine_") and callable(value)}


def example(hook) -> str:
    _, _, code = inspect.getdoc(hook).partition(".. code-block:: python")
    return textwrap.dedent(code)


def test_there_is_one_hook_per_slot_one_for_yaml_and_one_for_commands():
    assert set(HOOKS) == {*(f"engine_{slot}" for slot in SLOTS), "engine_config_searchpath", "engine_command"}


def test_every_slot_has_a_config_base():
    assert set(SLOT_CONFIGS) == set(SLOTS) and set(SLOTS) >= MULTI_SLOTS | API_SLOTS


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_every_hook_is_documented_with_an_example_of_that_hook(name):
    tree = ast.parse(example(HOOKS[name]))
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert function.name == name
    assert [decorator.id for decorator in function.decorator_list] == ["hookimpl"]


@pytest.mark.parametrize("slot", SLOTS)
def test_config_classes_in_the_examples_derive_from_the_base_of_their_slot(slot):
    for node in ast.parse(example(HOOKS[f"engine_{slot}"])).body:
        if isinstance(node, ast.ClassDef):
            assert [base.id for base in node.bases] == [SLOT_CONFIGS[slot].__name__]


def test_the_entry_point_group_carries_the_major_version():
    assert f"engine.plugins.v{PLUGIN_API[0]}" == hookspecs.ENTRY_POINT_GROUP
