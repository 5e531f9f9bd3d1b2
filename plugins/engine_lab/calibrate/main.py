"""Entry of ``engine calibrate``: both models are asked, the answers compared, and the table written."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from engine.contracts.command import FAILED, INTERRUPTED, OK, USAGE
from engine.contracts.shares import share_interval
from engine.service.agreement import LEAST_F1, SHORT_WORDS, agree
from engine.service.confidence import Calibration, confidence
from engine_lab.calibrate.isotonic import LEAST, Step, isotonic
from engine_lab.eval.progress import progress_bar
from engine_lab.eval.questions import messages_of
from engine_lab.eval.windows import json_lines, read_lines
from engine_lab.shared.errors import EvalError, EvalFailed, complain
from engine_lab.shared.output import check_writable, write_json

LIMIT_S = 600.0
"""Of a request."""

Messages = tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt, answered by both."""

    confidence: float
    agrees: bool


class _Message(msgspec.Struct):
    content: str | None = None


class _Token(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    logprobs: _Logprobs | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


def run(flags: argparse.Namespace) -> int:
    """Returns the exit status."""
    try:
        if flags.quantile >= 1.0:
            raise EvalError(f"--quantile {flags.quantile}: expected less than 1")
        check_writable(flags.out, [flags.prompts], "--out")
        prompts = read_prompts(flags.prompts)
        pairs = asyncio.run(ask_all(flags, prompts))
        steps = isotonic([(pair.confidence, pair.agrees) for pair in pairs])
        shares = tuple([(step.low, step.share) for step in steps])
        found = Calibration(flags.small, flags.large, len(pairs), flags.tokens, flags.quantile, shares)
        write_json(flags.out, msgspec.to_builtins(found))
    except EvalError as error:
        return complain("calibrate", error, USAGE)
    except (EvalFailed, OSError) as error:
        return complain("calibrate", error, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    Console().print(table(steps), f"Written to {flags.out}.", sep="\n")
    return OK


def read_prompts(path: str) -> list[Messages]:
    """Raises :class:`EvalError` for what is no prompt, and for fewer than a step of the table takes."""
    if Path(path).suffix == ".jsonl":
        found = [messages_of(where, line) for where, line in json_lines(path, "--prompts")]
    else:
        lines = [line.strip() for line in read_lines(path, "--prompts")]
        found = [({"role": "user", "content": line},) for line in lines if line]
    if len(found) < LEAST:
        raise EvalError(f"--prompts {path}: {len(found)} prompts; expected at least {LEAST}, better some hundreds")
    return found


async def ask_all(flags: argparse.Namespace, prompts: Sequence[Messages]) -> list[Pair]:
    """In order. Raises :class:`EvalFailed`."""
    free = asyncio.Semaphore(flags.at_once)
    headers = {"Authorization": f"Bearer {flags.api_key}"} if flags.api_key else {}
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        with progress_bar("prompts", len(prompts)) as done:

            async def one(messages: Messages) -> Pair:
                async with free:
                    small = await ask(session, flags, flags.small, messages, logprobs=True)
                    large = await ask(session, flags, flags.large, messages)
                done()
                tokens = [token.logprob for token in (small.logprobs and small.logprobs.content) or ()]
                if not tokens:
                    raise EvalFailed(f"{flags.small} gives no log probabilities, without which there is no confidence")
                sure = confidence(tokens[: flags.tokens], flags.quantile)
                return Pair(sure, agree(small.message.content or "", large.message.content or ""))

            try:
                async with asyncio.TaskGroup() as asking:
                    tasks = [asking.create_task(one(messages)) for messages in prompts]
            except* EvalFailed as failed:
                raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def ask(
    session: aiohttp.ClientSession, flags: argparse.Namespace, model: str, messages: Messages, *, logprobs: bool = False
) -> _Choice:
    """Raises :class:`EvalFailed`."""
    body: dict[str, Any] = {"model": model, "messages": messages, "temperature": 0, "max_tokens": flags.max_tokens}
    url = flags.url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    try:
        async with session.post(url, json=body | ({"logprobs": True} if logprobs else {})) as reply:
            data = await reply.read()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise EvalFailed(f"{url}: {error or 'timed out'}; is the server running?") from None
    if reply.status != 200:
        raise EvalFailed(f"{url} answered {reply.status}: {data[:300].decode('utf-8', 'replace')}")
    try:
        return msgspec.json.decode(data, type=_Answer).choices[0]
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
        raise EvalFailed(f"{url} answered what is no chat completion: {error}") from None


def table(steps: Sequence[Step]) -> Table:
    """What each threshold would bring: the share that the smaller model answers, and how often it agrees there."""
    title = f"agreement: equal up to {SHORT_WORDS} words, else F1 of words >= {LEAST_F1}; 95 % intervals"
    shown = Table(box=None, pad_edge=False, caption=title, caption_justify="left")
    for column in ("confidence from", "agree here", "answered by the smaller", "agree of these", "interval"):
        shown.add_column(column, justify="right")
    everything = sum(step.total for step in steps)
    for number, step in enumerate(steps):
        hits, total = (sum(getattr(one, name) for one in steps[number:]) for name in ("hits", "total"))
        low, high = share_interval(hits, total)
        words = (f"{step.share:.1%}", f"{total / everything:.1%}", f"{hits / total:.1%}", f"{low:.1%} to {high:.1%}")
        shown.add_row(f"{step.low:.3f}", *words)
    return shown
