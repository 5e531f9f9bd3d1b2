"""What servers that speak the OpenAI API do differently."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import aiohttp

T = TypeVar("T")


def api_of(base_url: str) -> str:
    """Where the API is: at ``/v1``, unless the URL ends in a version of its own (OpenVINO Model Server: ``/v3``)."""
    return base_url if re.search(r"/v\d+$", base_url) else f"{base_url}/v1"


async def again_if_closed(post: Callable[[], Awaitable[T]]) -> T:
    """``post``, once more where the connection was closed before any answer: llama.cpp closes connections after an
    answer without saying so, and the next request may be sent into one."""
    try:
        return await post()
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
        return await post()


def tokenize_bodies(model: str, text: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """What ``/tokenize`` may be asked, and whose way that is. Each answers with a list ``tokens``."""
    return (
        ("the server's /tokenize", {"model": model, "prompt": text}),
        ("the server's /tokenize (llama.cpp)", {"content": text}),
    )


def text_of(choice: Mapping[str, Any]) -> str | None:
    """Output text of a choice, streamed or whole. Reasoning is output like any other; servers disagree on the name of
    its field."""
    delta = choice.get("delta") or choice.get("message") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
