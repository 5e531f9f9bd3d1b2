"""Where the time of one request went: its spans, the steps after them, and who else those steps computed.

Events are kept for a bounded number of ended requests and steps. A waterfall is put together when somebody asks for it:
the spans of a :class:`engine.contracts.events.RequestEvent` follow each other, and the steps between two moments are
found by time, so nothing is counted per token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from operator import attrgetter
from typing import Any

from engine.contracts.events import AdmittedEvent, Event, PreemptedEvent, RequestEvent, StepEvent
from engine.service.timings import SPANS, staged_summary, staged_words

MAX_REQUESTS = 1024
MAX_STEPS = 8192
OVERLAP = 0.2
"""A step ends a little after the last token that it brings: less than this share does not count."""
ORDERS = {"latest": "at_s", "total": "e2e_ms", "ttft": "ttft_ms", "tpot": "tpot_ms", "queue": "queue_ms"}
"""Fields of :class:`RequestEvent` by which requests are ordered, the largest first."""
MAX_MARKS = 64
"""Most admissions, and most preemptions, that are kept of one request."""


@dataclass(slots=True)
class Marks:
    """When a sequence was preempted, and when it went on."""

    preempted: list[PreemptedEvent] = field(default_factory=list)
    admitted: list[AdmittedEvent] = field(default_factory=list)

    def of(self, engine: str) -> Marks:
        """Those that one engine made: what another one did with a sequence that moved on is not part of its time."""
        return Marks(
            [event for event in self.preempted if event.engine == engine],
            [event for event in self.admitted if event.engine == engine],
        )


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a request's time, in ms since it came in."""

    name: str
    start_ms: float
    ms: float
    detail: dict[str, Any] = field(default_factory=dict)
    inside: tuple[Span, ...] = ()

    def plain(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"name": self.name, "start_ms": round(self.start_ms, 3), "ms": round(self.ms, 3)}
        shown |= self.detail
        return shown | ({"inside": [span.plain() for span in self.inside]} if self.inside else {})


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Where the time of one sequence went."""

    request: RequestEvent
    spans: tuple[Span, ...]
    cause: str
    """The longest span, and what others had to do with it, in a few words."""

    @property
    def began_s(self) -> float:
        """When the request came in, on the events' clock."""
        return began_s(self.request)

    def plain(self) -> dict[str, Any]:
        request = self.request
        return {
            "request_id": request.request_id,
            "engine": request.engine,
            "class": request.slo_class,
            "attempts": request.attempts,
            "finish_reason": request.finish_reason,
            "prompt_tokens": request.prompt_tokens,
            "cached_tokens": request.cached_tokens,
            "loaded": request.loaded,
            "output_tokens": request.output_tokens,
            "max_tokens": request.max_tokens,
            "stream": request.parameters.stream if request.parameters is not None else None,
            "temperature": request.parameters.temperature if request.parameters is not None else None,
            "preemptions": request.preemptions,
            "draft_chains": request.draft_chains,
            "drafted_tokens": request.drafted_tokens,
            "accepted_tokens": request.accepted_tokens,
            "total_ms": round(request.e2e_ms + request.last_write_ms, 3),
            "ttft_ms": request.ttft_ms,
            "tpot_ms": request.tpot_ms,
            "cause": self.cause,
            "spans": [span.plain() for span in self.spans],
            "unattributed_ms": request.unattributed_ms,
            "meanwhile": {
                "detokenize_ms": request.detokenize_ms,
                "write_ms": request.write_ms,
                "unread_ms": request.unread_ms,
                "draft_ms": request.draft_ms,
            },
        }


class Waterfalls:
    """Feed :meth:`add` from the event bus, and ask on its thread."""

    def __init__(self, max_requests: int = MAX_REQUESTS, max_steps: int = MAX_STEPS) -> None:
        self._requests: OrderedDict[str, RequestEvent] = OrderedDict()
        self._marks: OrderedDict[str, Marks] = OrderedDict()
        self._steps: defaultdict[str, deque[StepEvent]] = defaultdict(lambda: deque(maxlen=max_steps))
        """The latest steps of each engine, by its id."""
        self._max_requests = max_requests
        self.forgot_s: float | None = None
        """When the last request ended that is no longer kept, on the events' clock; ``None``: all are."""

    def add(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case StepEvent():
                    self._steps[event.engine].append(event)
                case AdmittedEvent() if event.preemptions:
                    keep(self._marks_of(event.request_id).admitted, event)
                case PreemptedEvent():
                    keep(self._marks_of(event.request_id).preempted, event)
                case RequestEvent():
                    self._requests[event.request_id] = event
                    if len(self._requests) > self._max_requests:
                        self.forgot_s = self._requests.popitem(last=False)[1].at_s
                case _:
                    pass  # in the request's own event, too

    def _marks_of(self, request_id: str) -> Marks:
        marks = self._marks.get(request_id)
        if marks is None:
            marks = self._marks[request_id] = Marks()
            if len(self._marks) > 2 * self._max_requests:
                self._marks.popitem(last=False)
        return marks

    def recent(
        self, count: int, engine: str | None = None, order: str = "latest", slo_class: str = "", since_s: float = 0.0
    ) -> list[Waterfall]:
        """Waterfalls of the first requests by ``order``, one of :data:`ORDERS`, of those that ended last. ``engine``:
        of that one alone, by its id; ``slo_class``: of that class; ``since_s``: that ended after it, on the events'
        clock."""
        ended = (
            request
            for request in reversed(self._requests.values())
            if engine in (None, request.engine) and slo_class in ("", request.slo_class) and request.at_s >= since_s
        )
        names = [request.request_id for request in nlargest(count, ended, key=attrgetter(ORDERS[order]))]
        return [waterfall for name in names if (waterfall := self._of(name)) is not None]

    def find(self, request_id: str) -> list[Waterfall]:
        """Waterfalls of the sequence of that name, or of all sequences of the API request of that name."""
        names = [request_id, *(name for name in self._requests if name.rpartition("-")[0] == request_id)]
        return [waterfall for name in names if (waterfall := self._of(name)) is not None]

    def _of(self, request_id: str) -> Waterfall | None:
        request = self._requests.get(request_id)
        if request is None:
            return None
        marks = self._marks.get(request_id, Marks()).of(request.engine)
        return build(request, marks, self._steps[request.engine])

    def steps(self, engine: str, first_s: float, last_s: float) -> list[StepEvent]:
        """Steps of an engine between two moments, as far as they are kept: see :func:`steps_between`."""
        return steps_between(self._steps[engine], first_s, last_s)


def keep(marks: list[Any], event: Any) -> None:
    """Append, up to a limit."""
    if len(marks) < MAX_MARKS:
        marks.append(event)


def began_s(request: RequestEvent) -> float:
    """When it came in, on the events' clock."""
    return request.at_s - request.e2e_ms / 1e3


def steps_between(steps: Sequence[StepEvent], first_s: float, last_s: float) -> list[StepEvent]:
    """Steps that were at work between two moments, for :data:`OVERLAP` of their time or of this one."""
    at = bisect_left(steps, first_s, key=lambda step: step.at_s)
    found = []
    for index in range(at, len(steps)):
        step = steps[index]
        took_s = step.duration_ms / 1e3
        began = step.at_s - took_s
        if began >= last_s:
            break
        if min(step.at_s, last_s) - max(began, first_s) >= OVERLAP * min(took_s, last_s - first_s):
            found.append(step)
    return found


def build(request: RequestEvent, marks: Marks, steps: Sequence[StepEvent]) -> Waterfall:
    """The waterfall of one ended sequence."""
    began, at_ms = began_s(request), 0.0
    spans: list[Span] = []
    for name in SPANS:
        ms = float(getattr(request, f"{name}_ms"))
        if name in ("queue", "prefill", "decode") and ms > 0.0:
            mine = steps_between(steps, began + at_ms / 1e3, began + (at_ms + ms) / 1e3)
            spans.append(_with_steps(name, at_ms, ms, request, began, mine, marks))
        else:
            # What it spent at the engines before the one that served it is of the router's: it had to place it again.
            moved = {"attempts": request.attempts} if name == "route" and request.attempts > 1 else {}
            spans.append(Span(name, at_ms, ms, moved))
        at_ms += ms
    if request.last_write_ms:
        spans.append(Span("write", request.e2e_ms, request.last_write_ms))
    return Waterfall(request, tuple(spans), _cause(request, spans))


def _with_steps(
    name: str, at_ms: float, ms: float, request: RequestEvent, began: float, steps: Sequence[StepEvent], marks: Marks
) -> Span:
    """The span ``queue``, ``prefill`` or ``decode``, and what the engine's steps did meanwhile."""
    request_id = request.request_id
    detail: dict[str, Any] = {"steps": len(steps)}
    if others := blocked_by(request_id, steps):
        detail["blocked_by"] = others
    if name == "queue":
        detail["waiting"] = max((step.waiting for step in steps), default=0)
        detail["running"] = max((step.running for step in steps), default=0)
        detail["kv_used"] = round(max((step.kv_used for step in steps), default=0.0), 4)
        if request.staged is not None:
            detail["staged"] = staged_summary(request.staged)
        return Span(name, at_ms, ms, detail)
    detail["captured_steps"] = sum(step.captured for step in steps)
    detail["gap_ms"] = round(sum(step.gap_ms for step in steps), 3)
    first, last = began + at_ms / 1e3, began + (at_ms + ms) / 1e3
    lost = [event for event in marks.preempted if first <= event.at_s <= last]
    if lost:
        detail["preempted"] = [_preemption(event, began, marks) for event in lost]
    return Span(name, at_ms, ms, detail, tuple(_chunks(request_id, began, at_ms, steps)))


def _preemption(event: PreemptedEvent, began: float, marks: Marks) -> dict[str, Any]:
    again = next((admitted for admitted in marks.admitted if admitted.at_s >= event.at_s), None)
    return {
        "at_ms": round((event.at_s - began) * 1e3, 3),
        "lost_tokens": event.lost_tokens,
        "by": event.by,
        "waited_ms": None if again is None else round(again.waited_ms, 3),
    }


def _chunks(request_id: str, began: float, at_ms: float, steps: Iterable[StepEvent]) -> Iterable[Span]:
    """The steps that computed prompt tokens of the request, one after the other: the next is planned while one
    runs."""
    for step in steps:
        ended_ms = (step.at_s - began) * 1e3
        for chunk in step.chunks:
            if chunk.request_id == request_id:
                start_ms = max(at_ms, ended_ms - step.duration_ms)
                detail = {"step": step.step, "num_tokens": chunk.num_tokens, "context": chunk.context}
                yield Span("chunk", start_ms, max(0.0, ended_ms - start_ms), detail)
                at_ms = max(at_ms, ended_ms)


def blocked_by(request_id: str, steps: Iterable[StepEvent]) -> dict[str, Any] | None:
    """Whose prompt, of the other requests', these steps computed most tokens of; ``None``: they computed none."""
    tokens: dict[str, int] = {}
    counts: dict[str, int] = {}
    for step in steps:
        for chunk in step.chunks:
            if chunk.request_id != request_id:
                tokens[chunk.request_id] = tokens.get(chunk.request_id, 0) + chunk.num_tokens
                counts[chunk.request_id] = counts.get(chunk.request_id, 0) + 1
    if not tokens:
        return None
    most = max(tokens, key=lambda name: tokens[name])
    return {"request_id": most, "num_tokens": tokens[most], "steps": counts[most], "of": len(tokens)}


def _cause(request: RequestEvent, spans: Sequence[Span]) -> str:
    total = request.e2e_ms + request.last_write_ms
    longest = max(spans, key=lambda span: span.ms)
    said = f"{longest.name} {100 * longest.ms / total:.0f} %" if total > 0 else longest.name
    others = longest.detail.get("blocked_by")
    if longest.name == "route" and request.attempts > 1:
        before = request.attempts - 1
        said += f", {before} engine{'s' * (before > 1)} had it before {request.engine}"
    if longest.name == "queue":
        said += f", {longest.detail['running']} running"
        if request.staged is not None:
            said += f", {staged_words(request.staged)}"
    if others:
        said += f", beside {others['num_tokens']} prompt tokens of {others['request_id']}"
    if request.preemptions:
        said += ", preempted " + ("once" if request.preemptions == 1 else f"{request.preemptions} times")
    if longest.name == "decode" and max(request.write_ms, request.unread_ms) > 0.5 * longest.ms:
        said += ", the client reads slowly"
    return said
