"""``docs/reference.md`` says what the docstrings say."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.reference import CORE, PAGE, SHARED, page  # noqa: E402

from engine.contracts.slots import SLOTS  # noqa: E402


def test_the_page_is_the_one_that_the_docstrings_make() -> None:
    assert PAGE.read_text("utf-8") == page(), "docstrings have changed: run 'python tools/reference.py'"


def test_every_module_of_contracts_is_on_the_page() -> None:
    files = [file for file in (CORE / "contracts").iterdir() if file.suffix == ".py" or (file / "__init__.py").exists()]
    modules = {file.stem for file in files} - {"__init__", "percentiles", "shares"}
    assert modules == {*SLOTS, *SHARED}


def test_every_member_of_a_slots_protocol_is_on_the_page() -> None:
    text = PAGE.read_text("utf-8")
    for slot in SLOTS.values():
        protocol = slot.protocol
        section = text.split(f"\n## Slot {slot.name}\n")[1].split("\n## ")[0]
        members = [name for name in dir(protocol) if not name.startswith("_")]
        members += [name for name in getattr(protocol, "__annotations__", {}) if not name.startswith("_")]
        assert [name for name in members if f"* `{name}(" not in section and f"* `{name}: " not in section] == []


def test_every_method_of_a_contract_has_a_docstring() -> None:
    methods = {
        f"{protocol.__name__}.{name}": method
        for protocol in (slot.protocol for slot in SLOTS.values())
        for name, method in vars(protocol).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    assert [name for name, method in methods.items() if not method.__doc__] == []
    assert len(methods) > 30
