"""Lists, page by page, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from engine.service.errors import bad_request


def limit_of(http: web.Request, *, most: int, default: int) -> int:
    """``?limit=``: how many are shown. Raises :class:`ApiError` ``invalid``."""
    limit = http.query.get("limit", str(default))
    if not limit.isascii() or not limit.isdigit() or len(limit) > len(str(most)) or not 0 < int(limit) <= most:
        raise bad_request(f"limit={limit[:16]!r}: expected a number from 1 to {most}.", "limit")
    return int(limit)


def page(found: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """``found``: one more than ``limit`` where there are more."""
    shown = found[:limit]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": len(found) > limit}
