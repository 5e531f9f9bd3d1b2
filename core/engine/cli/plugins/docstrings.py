"""What a source file says of its classes and their fields, read without importing it."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any


def field_docs(cls: type[Any]) -> dict[str, str]:
    """The string after each field of a dataclass, its bases' fields included; fields without one are not there."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        node = _class_node(base)
        docs |= {} if node is None else dict(documented(node.body))
    return docs


def _class_node(cls: type[Any]) -> ast.ClassDef | None:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None or not file.endswith(".py"):
        return None
    body: Sequence[ast.stmt] = ast.parse(Path(file).read_text("utf-8")).body
    found = None
    for name in cls.__qualname__.split("."):
        found = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == name), None)
        body = found.body if found else ()
    return found


def documented(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """``(name, text)`` of every assignment with a string right after it."""
    for node, after in pairwise(body):
        name, text = assigned(node), string(after)
        if name and text:
            yield name, text


def assigned(node: ast.stmt) -> str:
    """The one name that a statement assigns to, or declares; empty: it does not."""
    match node:
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return ""


def string(node: ast.stmt) -> str:
    """The text of a statement that is a string and nothing else."""
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return inspect.cleandoc(text)
    return ""


def where_is(path: str) -> tuple[str, str]:
    """The file of ``package.module:attribute`` and what that says of the attribute, or else of itself.

    Imports the packages above the module, not the module. Raises whatever these raise.
    """
    module, _, attribute = path.partition(":")
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"No module named {module!r}")
    if not spec.origin.endswith(".py"):
        return spec.origin, ""
    tree = ast.parse(Path(spec.origin).read_text("utf-8"))
    defined = ast.ClassDef | ast.FunctionDef
    named = [node for node in tree.body if isinstance(node, defined) and node.name == attribute]
    return spec.origin, next(filter(None, map(ast.get_docstring, [*named, tree])), "")


def as_markdown(text: str) -> str:
    """Docstrings are reStructuredText: the little of it that they use, as Markdown. Code blocks stay code."""
    parts = re.split(r"^(?: *)\.\. code-block:: (\w+)\n((?:\n| +.*\n?)+)", text, flags=re.M)
    done = [_inline(parts[0])]
    for language, block, after in zip(parts[1::3], parts[2::3], parts[3::3]):
        done += [f"```{language}\n{inspect.cleandoc(block)}\n```\n\n", _inline(after)]
    return "".join(done).strip()


def _inline(text: str) -> str:
    text = re.sub(r":\w+:`([^`<]+?)\s*<[^`>]*>`", r"`\1`", text)
    text = re.sub(r":\w+:`~[\w.]*?(\w+)`", r"`\1`", text)
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", text)
    return re.sub(r"``(.+?)``", r"`\1`", text, flags=re.S)
