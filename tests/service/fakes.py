"""An engine that says what it is told to say, and a tokenizer of single bytes."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import tokenizers

from engine.assembly.plan import PLAN_VERSION, EnginePlan, SlotChoice
from engine.assembly.values import class_path
from engine.contracts.config import (
    BatchSettings,
    ConstraintConfig,
    DrafterConfig,
    FleetSettings,
    KVAllocatorConfig,
    ModelSettings,
    ParallelismConfig,
    SchedulerConfig,
    ServerSettings,
    Settings,
    SloSettings,
    SlotConfig,
)
from engine.contracts.events import Event
from engine.contracts.model import DeviceFacts
from engine.contracts.request import EngineRequest, FinishReason, Timings, TokenLogprobs, TokensOut
from engine.contracts.router import ToEngine as RouteToEngine
from engine.loop.client import EngineDead
from engine.loop.messages import (
    Abort,
    EngineInfo,
    EngineStats,
    ExpertLoad,
    Failed,
    Heartbeat,
    Progress,
    ReadExpertLoad,
    Ready,
    StepOutputs,
    Submit,
    ToEngine,
)
from engine.loop.streams import ClientBase
from engine.service.chat_template import TemplateSource
from engine.service.detokenizer import byte_of_symbol
from engine.service.template_worker import TemplateWorker
from engine.service.tokenizer import Tokenizer
from engine.testing.context import build_context

MODEL = "tiny"
MAX_LEN = 256
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = [("l", "l"), ("Ġ", "w"), ("a", "b")]


def tokenizer_json() -> bytes:
    """Byte-level BPE: one token per byte, a few merges, three special tokens at the end."""
    symbols = sorted(byte_of_symbol(), key=byte_of_symbol().get)  # type: ignore[arg-type]
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    added = [
        {
            "id": len(vocab) + i,
            "content": content,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, content in enumerate(SPECIALS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": [" ".join(pair) for pair in MERGES]},
        }
    ).encode()


TOKENIZER_JSON = tokenizer_json()
BACKEND = tokenizers.Tokenizer.from_buffer(TOKENIZER_JSON)
VOCAB = BACKEND.get_vocab_size()
END = BACKEND.token_to_id("<|end|>")


class SharedTemplate(TemplateWorker):
    """One for all tests of a process, with which it ends."""

    def close(self) -> None: ...


@functools.cache
def template() -> SharedTemplate:
    return SharedTemplate(TemplateSource(TEMPLATE, {}))


def make_tokenizer() -> Tokenizer:
    return Tokenizer(TOKENIZER_JSON, template())


def ids(text: str) -> tuple[int, ...]:
    """One token per byte, never merged."""
    return tuple(text.encode())


def text_of(tokens: Sequence[int]) -> str:
    return make_tokenizer().decode_now(tokens)


SLOT_CONFIGS = {
    "parallelism": ParallelismConfig(),
    "drafter": DrafterConfig(),
    "constraint": ConstraintConfig(),
    "kv_allocator": KVAllocatorConfig(),
    "scheduler": SchedulerConfig(),
}
"""Of the slots that a server asks about."""


def choice(slot: str, config: SlotConfig) -> SlotChoice:
    return SlotChoice(slot, "one", "", class_path(type(config)), asdict(config), "", "")


NO_BATCHES = BatchSettings(path="none")


def make_plan(
    batches: BatchSettings = NO_BATCHES,
    slo: SloSettings | None = None,
    fleet: FleetSettings | None = None,
    **server: Any,
) -> EnginePlan:
    listener = ServerSettings(**{"port": 0, **server})
    settings = Settings(
        model=ModelSettings(),
        batches=batches,
        server=listener,
        slo=slo or SloSettings(),
        fleet=fleet or FleetSettings(),
    )
    tiny = build_context(max_len=MAX_LEN).model
    model = replace(tiny, path="unused", name=MODEL, vocab_size=VOCAB, eos_token_ids=(END,))
    return EnginePlan(
        version=PLAN_VERSION,
        engine_version="0",
        model=model,
        device=DeviceFacts("cpu"),
        dtype="float32",
        max_len=MAX_LEN,
        execution="eager",
        overlap=False,
        settings=settings,
        slots={slot: (choice(slot, config),) for slot, config in SLOT_CONFIGS.items()},
    )


Script = Callable[[EngineRequest], Sequence[tuple[int, ...]]]
"""The tokens of each step for a request. The sequence ends with ``stop`` if the last token is :data:`END`."""


def says(text: str) -> Script:
    """One byte a step, then the end token."""
    return lambda request: [(token,) for token in (*ids(text), END)]


HELLO = says("Hello world")


class ScriptedClient(ClientBase):
    """Plays a script per request. ``hold`` makes it stop before the given step until :meth:`proceed`."""

    def __init__(self, script: Script = HELLO) -> None:
        super().__init__()
        self.script = script
        self.hold_before: int | None = None
        self.proceeding = asyncio.Event()
        self.holding = asyncio.Event()
        self.requests: list[EngineRequest] = []
        self.aborted: list[tuple[str, str]] = []
        self.abort_seen = asyncio.Event()
        self.starts = 0
        self.fail_starts = 0
        self.fail_request = ""
        self.slow_to_abort: asyncio.Event | None = None
        self.slow_to_close: asyncio.Event | None = None
        self.silent = False
        self.hang_at_start: asyncio.Event | None = None
        self.next_heartbeat = Heartbeat()
        self.killed: list[str] = []
        self.counts: dict[int, tuple[int, ...]] | None = None
        """Of experts; ``None``: no answer."""
        self.num_asked = 0
        """For these."""
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, on_progress: Callable[[Progress], None] | None = None) -> EngineInfo:
        self.starts += 1
        if on_progress:
            on_progress(Progress("loading weights", 0.5))
        if self.fail_starts:
            self.fail_starts -= 1
            raise EngineDead("no memory left")
        if self.hang_at_start is not None:
            await self.hang_at_start.wait()
            raise EngineDead(self.cause_of_death)
        info = EngineInfo(1, (8,), 16, 112, MAX_LEN, VOCAB, 0, 0, (), ())
        self.deliver(Ready(info))
        return info

    def send(self, message: ToEngine) -> None:
        match message:
            case Submit(request):
                self.requests.append(request)
                self._tasks[request.request_id] = asyncio.create_task(self._play(request))
            case Abort(names, reason):
                for name in names:
                    self.aborted.append((name, reason))
                    task = self._tasks.pop(name, None)
                    if task is not None:
                        task.cancel()
                        self._tasks[f"end of {name}"] = asyncio.create_task(self._end(name, reason))
                self.abort_seen.set()
            case ReadExpertLoad():
                self.num_asked += 1
                if self.counts is not None:
                    asyncio.get_running_loop().call_soon(self.deliver, ExpertLoad(self.counts))

    def ping(self) -> None:
        if not self.silent:
            self.deliver(self.next_heartbeat)

    def kill(self, why: str) -> None:
        self.killed.append(why)
        self.silent = False
        self.died(why)
        if self.hang_at_start is not None:
            self.hang_at_start.set()

    def die(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        self.deliver(Failed("killed"))

    async def reset_prefix_cache(self) -> None: ...

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        if self.slow_to_close is not None:
            await self.slow_to_close.wait()
        self.died("the engine was closed", cause="engine_closed")

    async def _play(self, request: EngineRequest) -> None:
        name = request.request_id
        steps = self.script(request)
        produced, given = 0, len(request.output)
        for number, tokens in enumerate(steps):
            if produced < given:  # another engine has said it
                produced += len(tokens)
                continue
            if number == self.hold_before:
                self.holding.set()
                await self.proceeding.wait()
            await asyncio.sleep(0)
            if self.fail_request and number == min(1, request.sampling.max_tokens):
                self._out(TokensOut(name, finish_reason="error", error=self.fail_request))
                return
            room = request.sampling.max_tokens - produced
            tokens = tokens[:room]
            produced += len(tokens)
            ended = tokens[-1:] == (END,) and not request.sampling.ignore_eos
            reason = "stop" if ended else "length" if produced == request.sampling.max_tokens else None
            self._out(
                TokensOut(
                    name,
                    tokens,
                    logprobs=_logprobs(tokens, request.sampling.logprobs),
                    prompt_logprobs=_prompt_logprobs(request) if number == 0 else (),
                    finish_reason=reason,
                    stop_token=END if ended else None,
                    timings=TIMINGS if reason else None,
                )
            )
            if reason:
                self._tasks.pop(name, None)
                return
        self._out(TokensOut(name, finish_reason="length", timings=TIMINGS))

    async def _end(self, name: str, reason: FinishReason) -> None:
        if self.slow_to_abort is not None:
            await self.slow_to_abort.wait()
        self._out(TokensOut(name, finish_reason=reason, timings=TIMINGS))

    def _out(self, output: TokensOut) -> None:
        self.deliver(StepOutputs((output,), (), EngineStats(step=self.stats.step + 1)))


TIMINGS = Timings(
    queue_ms=0.25,
    prefill_ms=0.5,
    decode_ms=0.125,
    cached_tokens=4,
    drafted_tokens=3,
    accepted_tokens=2,
    decode_steps=2,
    draft_chains=1,
    draft_ms=0.05,
)


def _logprobs(tokens: tuple[int, ...], k: int | None) -> tuple[TokenLogprobs, ...]:
    if k is None:
        return ()
    return tuple(
        TokenLogprobs(token, -0.5, tuple((t % VOCAB, -0.5 - j) for j, t in enumerate(range(token, token + k))))
        for token in tokens
    )


def _prompt_logprobs(request: EngineRequest) -> tuple[TokenLogprobs | None, ...]:
    k = request.sampling.prompt_logprobs
    return () if k is None else (None, *_logprobs(request.prompt[1:], k))


class DirectRouter:
    """Sends everything to the engine, or wherever ``decision`` says."""

    def __init__(self) -> None:
        self.decision: Any = RouteToEngine("default")
        self.requests: list[Any] = []
        self.fleets: list[Any] = []
        self.answers: list[Any] = []
        self.told: list[str] = []
        """Engines that requests were sent to."""

    def begun(self, request: Any, engine_id: str) -> None:
        self.told.append(engine_id)

    def place(self, request: Any, fleet: Any) -> Any:
        self.requests.append(request)
        self.fleets.append(fleet)
        if isinstance(self.decision, Exception):
            raise self.decision
        return self.decision

    def finished(self, request: Any, answer: Any) -> None:
        self.answers.append(answer)


class MemoryExporter:
    """Keeps events; its page says how many there were."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def export(self, events: Sequence[Event]) -> None:
        self.events.extend(events)

    def close(self) -> None:
        self.closed = True

    def render(self) -> str:
        return f"engine_events_total {len(self.events)}\n"


def in_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Runs an async test in a fresh event loop, for at most 20 s."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 20))

    return run
