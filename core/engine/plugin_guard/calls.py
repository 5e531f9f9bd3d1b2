"""Who raised this? Every call of a plugin's contract says so: slot, plugin, distribution and call.

:func:`named` is done once, when a plugin is built. What its methods raise keeps its type and gets a note; what would
end the process becomes a :class:`PluginError`. :func:`describe_error` is the line for users and clients; the traceback,
notes included, belongs in the log.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any, TypeVar

MOST_SHOWN = 120
"""Characters of a value that a message repeats."""
MOST_SAID = 400
"""Of what a plugin says in an exception."""
SEE_CHANGELOG = "; the engine's CHANGELOG.md says what changed for plugins"
_OWN_PACKAGES = frozenset({"engine", "engine_plugins", "engine_lab"})
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = MOST_SHOWN

_NAMES: dict[int, tuple[Callable[[], object], str]] = {}
"""By identity of a plugin: the plugin, if it is still there, and its name."""

P = TypeVar("P")


class PluginError(Exception):
    """A plugin broke its contract. The text names plugin and call."""


class _Note(str):
    """A note of ours among an exception's: ``quantizer=mine (from engine-mine 0.3.0): pack()``."""


def named(plugin: P, who: str, protocols: Iterable[type[Any]]) -> P:
    """The same object, of a class derived from its own whose contract methods say ``who`` raised.

    ``who``: ``quantizer=mine (from engine-mine 0.3.0)``. ``protocols``: whose methods are meant. An object whose class
    cannot be derived from is left as it is; callers who give it to :func:`describe_error` name it all the same. Raises
    ``TypeError`` for a method that is a coroutine: nobody would await it.
    """
    kind = type(plugin)
    if _known(plugin) is not None:
        return plugin  # one object, built twice
    methods = {name for protocol in protocols for name in _methods(protocol)}
    body: dict[str, Any] = {"__slots__": (), "__module__": kind.__module__, "__doc__": kind.__doc__}
    for name in methods:
        found = inspect.getattr_static(kind, name, None)
        if inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found):
            raise TypeError(f"{name}() is a coroutine, expected a plain method")
        if found is not None:
            body[name] = _method(found, f"{who}: {name}()")
    _remember(plugin, who)
    try:
        object.__setattr__(plugin, "__class__", type(kind.__name__, (kind,), body))  # frozen ones, too
    except Exception:  # a final class, one written in C, one whose metaclass wants no further class
        return plugin
    for name in methods & getattr(plugin, "__dict__", {}).keys():  # callables that __init__ made
        object.__setattr__(plugin, name, noting(getattr(plugin, name), f"{who}: {name}()"))
    return plugin


def name_of(plugin: object) -> str:
    """Who a plugin is in messages; its class for one that assembly did not build."""
    return _known(plugin) or type(plugin).__name__


def _remember(plugin: object, who: str) -> None:
    key = id(plugin)
    try:
        _NAMES[key] = (weakref.ref(plugin, lambda _: _NAMES.pop(key, None)), who)
    except TypeError:  # no weak reference to it: it lives on
        _NAMES[key] = (lambda: plugin, who)


def _known(plugin: object) -> str | None:
    held, who = _NAMES.get(id(plugin), (lambda: None, ""))
    return who if held() is plugin else None


def contract_error(plugin: object, call: str, problem: str) -> PluginError:
    """``contract_error(quantizer, "pack", "returned a list, expected a PlainWeight")``"""
    return PluginError(f"{name_of(plugin)}: {call}() {problem}")


def quote(value: object) -> str:
    """A value for a message: on one line, not long, whatever its ``__repr__`` does."""
    said = " ".join(_REPR.repr(value).split())
    return said if len(said) <= MOST_SHOWN else f"{said[:MOST_SHOWN]}..."


def noting(function: Callable[..., Any], call: str) -> Callable[..., Any]:
    """``function``; what it raises is noted as raised in ``call``."""

    @functools.wraps(function, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    def noted(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, PluginError):
                error.add_note(_Note(call))
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as stop:  # SystemExit, or one of the plugin's own that no handler of the core knows
            raise PluginError(f"{call} raised {_text(stop)}") from stop

    return noted


def by_plugin(error: BaseException) -> bool:
    """Whether it was raised by a plugin, or for what a plugin did."""
    return isinstance(error, PluginError) or any(isinstance(note, _Note) for note in getattr(error, "__notes__", ()))


def describe_error(error: BaseException, plugin: object = None, call: str = "") -> str:
    """One line for users: who raised what, in which call, and where in the plugin's code. ``plugin`` and ``call``: who
    was called, for an error without a note."""
    if isinstance(error, PluginError):
        return str(error)
    calls = [note for note in getattr(error, "__notes__", ()) if isinstance(note, _Note)]
    if calls or plugin is not None:
        return f"{calls[0] if calls else f'{name_of(plugin)}: {call}()'} raised {_text(error)}"
    return error_line(error)


def error_line(error: BaseException) -> str:
    """``ValueError: what it says``, on one line and not long, and :func:`changed`."""
    try:
        said = " ".join(str(error).split())[:MOST_SAID]
    except Exception:
        said = "its text cannot be read"
    return type(error).__name__ + (f": {said}" if said else "") + changed(error)


def changed(error: BaseException) -> str:
    """Where changes of the plugin interface are listed, if what is missing is the engine's: a module or a name of it,
    an attribute of its objects. Otherwise empty."""
    missing = ""
    if isinstance(error, ImportError):
        missing = str(error.name)
    elif isinstance(error, AttributeError):
        missing = error.obj.__name__ if isinstance(error.obj, ModuleType) else type(error.obj).__module__
    return SEE_CHANGELOG if missing.split(".")[0] in _OWN_PACKAGES else ""


def lacking(plugin: object, protocol: type[Any]) -> str:
    """What an object lacks that is not of its slot's protocol, for ``it is not a Quantizer: ``, and where changes
    of the plugin interface are listed."""
    members = {name for base in protocol.__mro__ for name in (*vars(base), *getattr(base, "__annotations__", ()))}
    missing = sorted(name for name in members if not (name.startswith("_") or hasattr(plugin, name)))
    return f"it lacks {', '.join(missing) or 'part of the protocol'}{SEE_CHANGELOG}"


def _text(error: BaseException) -> str:
    return error_line(error) + where(error.__traceback__)


def where(trace: TracebackType | None) -> str:
    """File and line of the innermost frame that is not torch's, in brackets."""
    found = ""
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if "torch" not in file.parts:
            found = f" ({file.name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found


def _methods(protocol: type[Any]) -> set[str]:
    return {
        name
        for base in protocol.__mro__
        for name, value in vars(base).items()
        if isinstance(value, FunctionType) and not name.startswith("_")
    }


def _method(found: Any, call: str) -> Any:
    if isinstance(found, FunctionType):
        return noting(found, call)
    if isinstance(found, staticmethod):
        return staticmethod(noting(found.__func__, call))
    if isinstance(found, classmethod):
        return classmethod(noting(found.__func__, call))
    return found  # a property or another descriptor: what it returns is not known yet
