"""Answers of targets, of which no more is held than they may have."""

from __future__ import annotations

import re

import aiohttp

COMMENTS = re.compile(rb"(?::[^\n]*\n|\r?\n)+")
"""Whole lines that say only that a target is alive."""


class NoAnswer(aiohttp.ClientPayloadError):
    """A target answered with what is no answer."""


async def read_at_most(content: aiohttp.StreamReader, most: int) -> bytes:
    """The rest of it. Raises :class:`NoAnswer` for more than ``most`` bytes, ``ClientError`` where it breaks off."""
    parts: list[bytes] = []
    size = 0
    async for part in content.iter_any():
        size += len(part)
        if size > most:
            raise NoAnswer(f"says more than {most} bytes")
        parts.append(part)
    return b"".join(parts)
