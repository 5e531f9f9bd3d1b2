import ast
import inspect
import sys
import textwrap
from types import ModuleType

import pytest

from engine import hookspecs
from engine.assembly.discovery import command_error, provider_error
from engine.contracts.provider import PLUGIN_API
from engine.contracts.slots import SLOTS
from engine.testing.context import build_context

HOOKS = {name: value for name, value in vars(hookspecs).items() if name.startswith("engine_") and callable(value)}


def example(hook) -> str:
    code = inspect.getdoc(hook).partition(".. code-block:: python")[2].partition("\nEach hook")[0]
    return textwrap.dedent(code)


def test_there_is_one_hook_per_slot_one_for_yaml_and_one_for_commands():
    assert set(HOOKS) == {*(f"engine_{slot}" for slot in SLOTS), "engine_config_searchpath", "engine_command"}


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_every_hook_is_documented_with_an_example_of_that_hook(name):
    tree = ast.parse(example(HOOKS[name]))
    *_, function = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert function.name == name
    assert [decorator.id for decorator in function.decorator_list] == ["hookimpl"]


def answer(name):
    """What the example of a hook returns, run after the lines that all examples begin with."""
    module = ModuleType("engine_mine")
    exec(compile(example(hookspecs), "preamble", "exec"), module.__dict__)  # noqa: S102
    exec(compile(example(HOOKS[name]), name, "exec"), module.__dict__)  # noqa: S102 - our own docstring
    return vars(module)[name]()


@pytest.mark.parametrize("slot", SLOTS)
def test_the_example_of_a_hook_runs_and_offers_a_plugin_that_may_be_selected(slot, monkeypatch):
    monkeypatch.setitem(sys.modules, "engine_mine", ModuleType("engine_mine"))  # where dataclasses look
    (provider,) = answer(f"engine_{slot}")
    assert provider_error(slot, provider) == ""
    (provider.config or SLOTS[slot].config)()
    context = build_context()
    reasons = provider.unsupported(context.model, context.device)
    assert isinstance(reasons, tuple) and all(isinstance(reason, str) for reason in reasons)


def test_the_examples_of_the_other_hooks_run():
    (command,) = answer("engine_command")
    assert command_error(command) == ""
    assert answer("engine_config_searchpath") == ["pkg://engine_mine.conf"]


@pytest.mark.parametrize("slot", SLOTS)
def test_config_classes_in_the_examples_derive_from_the_base_of_their_slot(slot):
    for node in ast.parse(example(HOOKS[f"engine_{slot}"])).body:
        if isinstance(node, ast.ClassDef):
            assert [base.id for base in node.bases] == [SLOTS[slot].config.__name__]


def test_the_entry_point_group_carries_the_major_version():
    assert f"engine.plugins.v{PLUGIN_API[0]}" == hookspecs.ENTRY_POINT_GROUP
