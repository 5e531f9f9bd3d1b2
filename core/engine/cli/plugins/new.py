"""``engine plugins new``: a package with a plugin that works, to be changed into one's own."""

from __future__ import annotations

import argparse
import re
from importlib.util import find_spec
from pathlib import Path

from engine.assembly.discovery import Discovered, discover
from engine.assembly.errors import AssemblyError
from engine.assembly.records import provider_error
from engine.cli.plugins.named import check_slot
from engine.contracts.command import OK, Command
from engine.contracts.provider import Provider
from engine.contracts.slots import SLOTS

TEMPLATES = Path(__file__).with_name("templates")
PACKAGE = "engine.cli.plugins.templates"
"""What the templates are as modules: in a new package, the plugin's module has another name."""
PLACEHOLDER = "mine"
"""The name that all templates have for their plugin."""


def package_files(slot: str, name: str) -> dict[str, str]:
    """The files of a package, by path in its folder."""
    sources = {
        "pyproject.toml": "pyproject.toml.in",
        f"engine_{name}.py": f"{slot}/plugin.py",
        f"tests/test_engine_{name}.py": f"{slot}/suite.py",
        "README.md": "README.md.in",
    }
    return {path: _renamed((TEMPLATES / source).read_text("utf-8"), slot, name) for path, source in sources.items()}


def _renamed(text: str, slot: str, name: str) -> str:
    """A template's text for a plugin of this name."""
    beside = "host" if slot == "kv_store" else "prometheus"
    words = {
        "@SLOT@": slot,
        "@SELECT@": f"{slot}={name}" if not SLOTS[slot].many else f"'{slot}=[{beside},{name}]'",
        "@DIST@": dist_of(name),
        f"{PACKAGE}.{slot}.plugin": f"engine_{name}",
        PLACEHOLDER: name,
        PLACEHOLDER.capitalize(): "".join(part.capitalize() for part in name.split("_")),
    }
    fixed = "|".join(map(re.escape, list(words)[:-2]))
    # In one pass: a name may hold the placeholder.
    found = re.compile(rf"{fixed}|(?<![a-z]){PLACEHOLDER}\b|{PLACEHOLDER.capitalize()}(?=[A-Z])")
    return found.sub(lambda match: words[match[0]], text)


def dist_of(name: str) -> str:
    """The distribution's name, which is the folder's, too."""
    return f"engine-{name.replace('_', '-')}"


def write_package(slot: str, name: str, parent: Path) -> Path:
    """The new folder. Raises :class:`AssemblyError` where something of that name is there, or cannot be written."""
    folder = parent / dist_of(name)
    try:
        folder.mkdir()
        for path, text in package_files(slot, name).items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text, "utf-8")
    except FileExistsError as error:
        raise AssemblyError([f"{folder} is there already; choose another name, or another place with --dir"]) from error
    except OSError as error:
        raise AssemblyError([f"{folder} cannot be written: {error.strerror}; --dir says where it goes"]) from error
    return folder


def check_name(slot: str, name: str, discovered: Discovered) -> None:
    """Raises :class:`AssemblyError` where a plugin cannot have this name, or another one has it."""
    from engine.assembly.compose import options

    if name in SLOTS and slot not in SLOTS:
        raise AssemblyError([f"the slot comes first: engine plugins new {name} {slot}"])
    check_slot(slot)
    wrong = provider_error(slot, Provider(name, "module:attribute"))
    if wrong:
        raise AssemblyError([wrong])
    taken = [f"a plugin of {offer.origin}" for offer in discovered.named(slot, name)]
    if not taken and name in options(discovered)[slot]:
        taken = ["a variant in YAML"]
    module = f"engine_{name}"
    if not taken and (spec := find_spec(module)) is not None:
        taken = [f"the module {module} of another package ({spec.origin})"]
    if taken:
        raise AssemblyError([f"the name {name!r} is taken by {taken[0]}; choose another one"])


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("slot", metavar="SLOT", help=f"one of {', '.join(SLOTS)}")
    parser.add_argument("name", metavar="NAME", help="lower-case letters, digits and '_'; overrides select it by this")
    parser.add_argument(
        "--dir", type=Path, default=Path(), metavar="DIR", help="where the package goes (default: here)"
    )


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    check_name(flags.slot, flags.name, discover())
    folder = write_package(flags.slot, flags.name, flags.dir)
    readme = (folder / "README.md").read_text("utf-8")
    print(f"wrote {folder}:")
    for path in package_files(flags.slot, flags.name):
        print(f"  {path}")
    print(f"\nnext:\n{readme.split('```')[1].strip()}")
    return OK


COMMAND = Command(
    "Write a package with a plugin that works and the suite of its slot as its tests; change it into your own.",
    _run,
    _flags,
    takes_overrides=False,
)
