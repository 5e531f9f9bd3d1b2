"""ShareGPT's conversations: ``[{"id": ..., "conversations": [{"from": "human" | "gpt", "value": ...}, ...]}, ...]``.

There are texts and no times: every conversation begins at 0 s, each further question comes with the answer to the one
before, and tokens are estimated from characters. A prompt is all that was said before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine_lab.shared.simulation.trace import TraceRequest
from engine_lab.shared.simulation.traces.lines import TraceError

CHARS_PER_TOKEN = 4.0
BLOCK_TOKENS = 16
QUESTION, ANSWER = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard")


def read_sharegpt(path: Path) -> Iterator[TraceRequest]:
    try:
        conversations = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except (OSError, msgspec.DecodeError) as error:
        raise TraceError(f"{path}: expected a list of conversations as JSON ({error})") from error
    for index, conversation in enumerate(conversations):
        turns = conversation.get("conversations")
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise TraceError(f"{path}, conversation {index}: expected a list of turns in 'conversations'")
        yield from _turns(index, turns)


def _turns(index: int, turns: Sequence[Mapping[str, Any]]) -> Iterator[TraceRequest]:
    """The answers of a conversation. Blocks are those of one text that grows."""
    before, asked, session = 0, 0, f"conversation {index}"
    after: tuple[str, ...] = ()
    for number, turn in enumerate(turns):
        tokens = max(1, round(len(str(turn.get("value") or "")) / CHARS_PER_TOKEN))
        if turn.get("from") in ANSWER and asked:
            request_id, end = f"{session}, turn {number}", before + tokens
            hashes = tuple((index << 24) + block for block in range(-(-end // BLOCK_TOKENS)))
            yield TraceRequest(0.0, before, tokens, hashes, BLOCK_TOKENS, session, request_id, after)
            after, asked = (request_id,), 0
        elif turn.get("from") in QUESTION:
            asked += tokens
        before += tokens
