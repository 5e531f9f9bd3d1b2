"""The ``traceparent`` header of W3C Trace Context: which trace of the client a request belongs to.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def valid_traceparent(sent: Sequence[str]) -> str:
    """The one header that was sent, in version 00's form; empty where there is none, or none that is valid: the trace
    begins here then. Later versions may have more behind these fields."""
    if len(sent) != 1:
        return ""
    match = _FORM.fullmatch(sent[0].strip())
    if match is None:
        return ""
    version, trace, parent, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(parent, 16):
        return ""
    return f"00-{trace}-{parent}-{int(flags, 16) & 1:02x}"
