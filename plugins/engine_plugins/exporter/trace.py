"""Exporter ``trace``: requests as a trace that ``engine simulate`` replays, with what their texts share.

A line has arrival, lengths, and hashes of the blocks of prompt and output: those of equal beginnings are equal. What
was measured of the request is there, too: a simulation starts from it and is judged by it. Of several engines the line
names the one that served the request. Hashes are keyed with a random salt that is kept nowhere, and different in every
run of the server: they tell nothing about texts, and nothing across runs. Token ids and texts are not written.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from engine.contracts.events import DEFAULT_ENGINE, Event, RequestEvent
from engine.contracts.exporter import Transcript
from engine.contracts.provider import BuildContext
from engine_plugins.exporter.config import TraceConfig

FORMAT = "engine.trace.v1"
HASH_BYTES = 8
MOST_WAITING = 4096
"""Transcripts whose events are still to come: where events are dropped, they never do."""


class TraceExporter:
    """The plugin: a :class:`~engine.contracts.exporter.TranscriptExporter`. Raises ``ValueError`` when the file cannot
    be opened for appending."""

    def __init__(self, config: TraceConfig, context: BuildContext) -> None:
        try:
            self._file = open(config.path, "ab")  # noqa: SIM115 - open until close()
        except OSError as error:
            raise ValueError(
                f"exporter.trace.path={config.path}: expected a file that can be written ({error.strerror}); "
                "choose another with exporter.trace.path=FILE"
            ) from error
        self._block_size = context.block_size
        self._salt = secrets.token_bytes(32)
        self._encoder = msgspec.json.Encoder()
        self._started_s = time.monotonic()
        self._ended: dict[str, Transcript] = {}
        head = {"format": FORMAT, "started": time.time(), "block_tokens": self._block_size}
        self._file.write(self._encoder.encode_lines([head]))
        self._file.flush()

    def transcripts(self, ended: Sequence[Transcript]) -> None:
        for transcript in ended:
            self._ended[transcript.request_id] = transcript
        for oldest in list(self._ended)[:-MOST_WAITING]:
            del self._ended[oldest]

    def export(self, events: Sequence[Event]) -> None:
        lines = []
        for event in events:
            if not isinstance(event, RequestEvent):
                continue
            transcript = self._ended.pop(event.request_id, None)
            if transcript is not None and transcript.output:
                lines.append(self._line(event, transcript))
        if lines:
            self._file.write(self._encoder.encode_lines(lines))
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _line(self, event: RequestEvent, transcript: Transcript) -> dict[str, object]:
        served_by = {} if event.engine == DEFAULT_ENGINE else {"engine": event.engine}
        return served_by | {
            "arrival_s": round(max(0.0, event.at_s - event.e2e_ms / 1e3 - self._started_s), 6),
            "prompt_tokens": event.prompt_tokens,
            "output_tokens": event.output_tokens,
            "block_hashes": self._hashes(transcript),
            "measured": _measured(event),
        }

    def _hashes(self, transcript: Transcript) -> list[int]:
        """Of each full block, with all that is before it."""
        tokens, size = (*transcript.prompt, *transcript.output), self._block_size
        pack = struct.Struct(f"<{size}I").pack
        chain, hashes = self._hash(transcript.cache_salt.encode()), []
        for start in range(0, len(tokens) - size + 1, size):
            chain = self._hash(chain + pack(*tokens[start : start + size]))
            hashes.append(int.from_bytes(chain))
        return hashes

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=HASH_BYTES, key=self._salt).digest()


def _measured(event: RequestEvent) -> dict[str, float]:
    """Times in milliseconds, as :class:`~engine.contracts.events.RequestEvent` has them."""
    times = {
        "ttft_ms": event.ttft_ms,
        "e2e_ms": event.e2e_ms,
        "receive_ms": event.receive_ms + event.route_ms,
        "tokenize_ms": event.tokenize_ms,
        "dispatch_ms": event.dispatch_ms,
        "queue_ms": event.queue_ms,
        "prefill_ms": event.prefill_ms,
    }
    counts = {
        "cached_tokens": event.cached_tokens,
        "drafted_tokens": event.drafted_tokens,
        "accepted_tokens": event.accepted_tokens,
        "draft_chains": event.draft_chains,
    }
    return {name: round(value, 3) for name, value in times.items()} | counts
