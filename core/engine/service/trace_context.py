"""W3C Trace Context: which trace of the client a request belongs to, and the span of it here.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]{1,512}")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The trace of a request; empty where the client sent none that is valid."""

    parent: str = ""
    """The client's ``traceparent``."""
    span_id: str = ""
    """The span of the request here: 16 hexadecimal digits."""
    state: str = ""
    """The client's ``tracestate``."""

    @property
    def own(self) -> str:
        """The ``traceparent`` whose parent is the request here; empty without a trace."""
        return f"{self.parent[:36]}{self.span_id}{self.parent[52:]}" if self.parent else ""

    def headers(self) -> dict[str, str]:
        """Headers for a server that the request is passed on to."""
        given = {"traceparent": self.own, "tracestate": self.state}
        return {name: value for name, value in given.items() if value}


NO_TRACE = TraceContext()


def trace_context(parents: Sequence[str], states: Sequence[str]) -> TraceContext:
    """What the ``traceparent`` and ``tracestate`` headers of a request say. States count with a valid parent alone."""
    parent = valid_traceparent(parents)
    if not parent:
        return NO_TRACE
    state = ",".join(states)
    return TraceContext(parent, new_id(8), state if _STATE.fullmatch(state) else "")


def new_id(num_bytes: int) -> str:
    """Random hexadecimal digits, not all of them zero."""
    found = secrets.token_hex(num_bytes)
    return found if found.strip("0") else new_id(num_bytes)


def valid_traceparent(sent: Sequence[str]) -> str:
    """The one header that was sent, in version 00's form; empty where there is none, or none that is valid: the trace
    begins here then. Later versions may have more after these fields."""
    if len(sent) != 1:
        return ""
    match = _FORM.fullmatch(sent[0].strip())
    if match is None:
        return ""
    version, trace, parent, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(parent, 16):
        return ""
    return f"00-{trace}-{parent}-{int(flags, 16) & 1:02x}"
