"""What has to be known about a server before the run: its model's name, and how long its tokens are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from engine_lab.bench.quirks import api_of, tokenize_bodies
from engine_lab.bench.target import Target
from engine_lab.bench.workload import BenchRequest

SAMPLE_CHARS = 4000
Counter = Callable[[str], int]
"""Number of tokens of a text."""


class ProbeError(RuntimeError):
    """The server cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Calibration:
    chars_per_token: float
    source: str
    """How it was found, for the report."""


async def find_model(session: aiohttp.ClientSession, base_url: str, api_key: str | None) -> str:
    """The first model the server lists. Raises :class:`ProbeError` if there is none."""
    url = f"{api_of(base_url)}/models"
    headers = Target(base_url, "", "chat", api_key).headers
    try:
        async with session.get(url, headers=headers) as response:
            if response.status != 200:
                raise ProbeError(f"{url} answered {response.status}: {(await response.text())[:300]}")
            listed = msgspec.json.decode(await response.read())
        return str(listed["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ProbeError(f"{url}: {error or 'timed out'}; is the server running? (--url)") from error
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise ProbeError(f"{url} lists no model; name one with --model") from error


async def calibrate(
    session: aiohttp.ClientSession, target: Target, text: str, count_tokens: Counter | None = None
) -> Calibration:
    """How many characters of the beginning of ``text`` make a token, by the most exact way the server offers."""
    sample = text[:SAMPLE_CHARS]
    if count_tokens is not None:
        return Calibration(len(sample) / max(1, count_tokens(sample)), "--tokenizer")
    for source, body in tokenize_bodies(target.model, sample):
        answer = await post(session, f"{target.base_url}/tokenize", target, body)
        tokens = answer.get("tokens")
        if isinstance(tokens, list) and len(tokens) > 1:
            return Calibration(len(sample) / len(tokens), source)
    short = await prompt_tokens(session, target, sample[: len(sample) // 5])
    whole = await prompt_tokens(session, target, sample)
    if short is not None and whole is not None and whole > short:
        # The difference of two lengths cancels what a chat template adds.
        chars = len(sample) - len(sample) // 5
        return Calibration(chars / (whole - short), "usage of two requests sent before the run")
    return Calibration(4.0, "assumed: the server has no /tokenize and reports no usage")


async def prompt_tokens(session: aiohttp.ClientSession, target: Target, text: str) -> int | None:
    """Tokens of a prompt according to the server's ``usage``, if it reports any."""
    answer = await post(session, target.url, target, target.body(BenchRequest(0, text, 1), stream=False))
    count = (answer.get("usage") or {}).get("prompt_tokens")
    return count if isinstance(count, int) else None


async def post(session: aiohttp.ClientSession, url: str, target: Target, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON object a server answers with; empty when it answers with anything else (no such route)."""
    try:
        async with session.post(url, data=msgspec.json.encode(body), headers=target.headers) as response:
            if response.status != 200:
                return {}
            answer = msgspec.json.decode(await response.read())
    except msgspec.DecodeError:
        return {}
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ProbeError(f"{url}: {error or 'timed out'}; is the server running? (--url)") from error
    return answer if isinstance(answer, dict) else {}


def load_tokenizer(path: str) -> Counter:
    """Token counts by a ``tokenizer.json`` or a directory that holds one. Raises ``ValueError`` if there is
    none."""
    from tokenizers import Tokenizer

    file = Path(path, "tokenizer.json") if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"--tokenizer {path}: expected a tokenizer.json or a directory that holds one")
    tokenizer = Tokenizer.from_file(str(file))

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count
