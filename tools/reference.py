"""Writes docs/reference.md from docstrings: every command, hook, slot's contract and setting.

Sources are read, not run (but for the parsers of commands), so the page is the same on every machine.

    python tools/reference.py
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.assembly.discovery import discover
from engine.cli.command import parser_of
from engine.cli.commands import after_others, commands, load
from engine.cli.plugins.docstrings import as_markdown, assigned, string
from engine.contracts.command import Command
from engine.contracts.config import PluginSettings
from engine.contracts.slots import SLOTS

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "core" / "engine"
PAGE = ROOT / "docs" / "reference.md"
SHARED = (
    *("slots", "provider", "command", "findings", "config", "model", "graph", "ops"),
    *("request", "events", "counters", "step_cost"),
)
"""Modules of ``engine.contracts`` that no slot has for itself, in the order of the page."""

KINDS = {"Protocol": "Contract", "msgspec.Struct": "Data"}
"""What a class is, by a base that says so; others are dataclasses."""
LONG = 100
"""Characters of a value that is not shown."""

HEAD = """\
# Reference

Every command, hook, contract and setting, from the docstrings of `engine.cli`, `engine.hookspecs` and
`engine.contracts`. `python tools/reference.py` writes this page; [plugins.md](plugins.md) is the guide.

{contents}
"""


def page() -> str:
    """The whole page."""
    parts = {
        "Commands": _commands(),
        "Hooks": _hooks(),
        **{f"Slot {slot}": _module(slot, f"config base: `{SLOTS[slot].config.__name__}`") for slot in SLOTS},
        **{f"Module {name}": _module(name) for name in SHARED},
    }
    contents = " · ".join(f"[{title}](#{title.lower().replace(' ', '-')})" for title in parts)
    sections = "".join(f"\n## {title}\n\n{text.rstrip()}\n" for title, text in parts.items())
    return HEAD.format(contents=contents) + sections


def _commands() -> str:
    known = commands(discover(PluginSettings(third_party=False))) | after_others()
    return "\n".join(_command(name, load(offer)) for name, offer in sorted(known.items()))


def _command(name: str, command: Command) -> str:
    parser = parser_of(name, command)
    lines = [f"### `{parser.usage}`", "", command.help, ""]
    lines += [_flag(parser, action) for action in parser._actions if "--help" not in action.option_strings]
    return "\n".join([*lines, ""])


def _flag(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    if isinstance(value, tuple):
        value = " ".join(value)
    shown = ", ".join(action.option_strings) or value
    if action.option_strings and action.nargs != 0:
        shown += f" {value}"
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return f"* `{shown}`: {text}" if text else f"* `{shown}`"


def _hooks() -> str:
    source = Source(CORE / "hookspecs.py")
    hooks = [node for node in source.tree.body if isinstance(node, ast.FunctionDef)]
    texts = [f"### `{node.name}() -> {source.text(node.returns)}`\n\n{source.doc(node)}\n" for node in hooks]
    return "\n".join([source.doc(source.tree), "", *texts])


def _module(name: str, note: str = "") -> str:
    """A module, or the files of a package as one."""
    path = CORE / "contracts" / name
    files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]  # of a package __init__ is first
    where = f"`engine.contracts.{name}`" + (f"; {note}" if note else "")
    sources = [Source(file) for file in files]
    members = (member for source in sources for member in source.members(source.tree.body, "###"))
    return "\n\n".join([where, sources[0].doc(sources[0].tree), *members])


class Source:
    """A file whose public names are described."""

    def __init__(self, file: Path) -> None:
        source = file.read_text("utf-8")
        self.tree = ast.parse(source)
        self._lines = source.encode().split(b"\n")

    def text(self, node: ast.AST | None) -> str:
        """A piece of the file on one line."""
        if node is None:
            return ""
        first, last = node.lineno - 1, node.end_lineno
        lines = self._lines[first:last]
        lines[-1] = lines[-1][: node.end_col_offset]  # offsets count bytes
        lines[0] = lines[0][node.col_offset :]
        return " ".join(b"\n".join(lines).decode().split())

    @staticmethod
    def doc(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> str:
        return as_markdown(ast.get_docstring(node) or "")

    def members(self, body: Sequence[ast.stmt], level: str) -> Iterator[str]:
        """Every public class, function and documented name."""
        for node, after in zip(body, [*body[1:], ast.Pass()]):
            match node:
                case ast.ClassDef(name=name) if not name.startswith("_"):
                    yield f"{level} `{name}`\n\n{self._class(node)}".rstrip()
                case ast.FunctionDef(name=name) if not name.startswith("_"):
                    yield f"{level} `{self._signature(node)}`\n\n{self.doc(node)}".rstrip()
                case ast.Assign(value=value) | ast.AnnAssign(value=value) if assigned(node)[:1].isalpha():
                    text = self.text(value)
                    shown = f"`{assigned(node)} = {text}`" if len(text) <= LONG else f"`{assigned(node)}`"
                    yield f"{level} {shown}\n\n{as_markdown(string(after))}".rstrip()

    def _class(self, node: ast.ClassDef) -> str:
        bases = ", ".join(f"`{self.text(base)}`" for base in node.bases if self.text(base) not in KINDS)
        kind = f"*{self._kind(node)}{', from ' + bases if bases else ''}.* "
        pairs = zip(node.body, [*node.body[1:], ast.Pass()])
        items = [self._item(child, after) for child, after in pairs if not (bases and self._only_overrides(child))]
        return f"{kind}{self.doc(node)}\n\n" + "\n".join(filter(None, items))

    def _only_overrides(self, node: ast.stmt) -> bool:
        """Whether a member of a derived class says nothing that its base does not."""
        if isinstance(node, ast.AnnAssign):
            return self.text(node.annotation).startswith("ClassVar")
        return isinstance(node, ast.FunctionDef) and not self.doc(node)

    def _kind(self, node: ast.ClassDef) -> str:
        kinds = [KINDS[base] for base in map(self.text, node.bases) if base in KINDS]
        return kinds[0] if kinds else "Data"

    def _item(self, node: ast.stmt, after: ast.stmt) -> str:
        """A member of a class as an item of a list."""
        match node:
            case ast.AnnAssign(annotation=annotation, value=value) if not assigned(node).startswith("_"):
                shown = f"{assigned(node)}: {self.text(annotation)}" + (f" = {self.text(value)}" if value else "")
                return _listed(shown, as_markdown(string(after)))
            case ast.FunctionDef(name=name) if not name.startswith("_") or name == "__call__":
                return _listed(self._signature(node), self.doc(node))
        return ""

    def _signature(self, node: ast.FunctionDef) -> str:
        """As it is called: without ``self``."""
        if any(self.text(decorator) == "property" for decorator in node.decorator_list):
            return f"{node.name}: {self.text(node.returns)}"
        arguments = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
        return f"{node.name}({arguments})" + (f" -> {self.text(node.returns)}" if node.returns else "")


def _listed(shown: str, text: str) -> str:
    indented = text.replace("\n", "\n  ").replace("\n  \n", "\n\n")
    return f"* `{shown}`" + (f": {indented}" if text else "")


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    ).parse_args()
    PAGE.write_text(page(), "utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
