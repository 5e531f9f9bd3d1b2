"""The engines of a server, by id: each with what belongs to it alone."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from engine.assembly.plan import EnginePlan
from engine.contracts.config.fleet import Role
from engine.contracts.events import DEFAULT_ENGINE, Event
from engine.contracts.router import EngineView
from engine.contracts.step_cost import StepCost
from engine.counters.engine import EngineCounters
from engine.loop.client import EngineClient
from engine.service.errors import ApiError
from engine.service.forecast import Forecast
from engine.service.grammars import GrammarChecks
from engine.service.history import History
from engine.service.latency import RollingLatency
from engine.service.load import Load
from engine.service.parsing import Limits
from engine.service.prefill_time import prefill_s
from engine.service.prefix_misses import RecentPrompts
from engine.service.supervisor import State, Supervisor
from engine.service.tokenizer import Tokenizer


class Leaving(Protocol):
    """A sequence that was sent to an engine."""

    stays: str
    """Why it has not left, when it was told to; empty: it leaves, or was not."""

    def leave(self) -> None:
        """Go to another engine, if there is one that can go on with it."""


@dataclass(slots=True, eq=False)
class EngineHandle:
    """One engine, as the server holds it. Use on the event loop's thread only."""

    id: str
    plan: EnginePlan
    client: EngineClient
    tokenizer: Tokenizer
    role: Role = "both"
    grammars: GrammarChecks = field(default_factory=lambda: GrammarChecks(None))
    """Refuses grammars; shared by engines of one plan, as the tokenizer is."""
    supervisor: Supervisor = field(init=False)
    counters: EngineCounters = field(init=False)
    latency: RollingLatency = field(default_factory=RollingLatency)
    history: History = field(default_factory=History)
    prompts: RecentPrompts = field(default_factory=RecentPrompts)
    load: Load = field(default_factory=Load)
    """What was sent there and has not ended."""
    forecast: Forecast = field(init=False)
    """Of first tokens."""
    sendings: set[Leaving] = field(default_factory=set)
    """The sequences of :attr:`load`."""
    draining: bool = False
    """It is given no more requests, and ends those that no other engine can go on with. ``False`` again: it is given
    requests again."""
    fingerprint: str = field(init=False)
    """A name of the engine's plan: it changes when anything about the engine does."""

    def __post_init__(self) -> None:
        stall_s, serving_s = self.plan.settings.server.stall_s, self.plan.stall_s
        self.supervisor = Supervisor(self.client, stall_s, serving_s=serving_s, engine=self.id)
        slo = self.plan.settings.slo
        self.counters = EngineCounters(self.plan.drafter.max_width, self.id, tuple(slo.classes))
        self.forecast = Forecast(slo.late_s)
        asked = dataclasses.replace(self.plan, memory_bytes=None)  # what happened to be free is not part of it
        self.fingerprint = "fp_" + hashlib.sha256(asked.to_json()).hexdigest()[:10]
        self.tokenizer.most_tokens = max(self.tokenizer.most_tokens, self.plan.max_len)

    @property
    def state(self) -> State:
        return self.supervisor.state

    @property
    def model(self) -> str:
        return self.plan.model.name

    @property
    def max_len(self) -> int:
        """Most tokens of one sequence; the engine knows better than the plan once it is up."""
        info = self.client.info
        return min(self.plan.max_len, info.max_len) if info else self.plan.max_len

    @property
    def vocab_size(self) -> int:
        return self.plan.model.vocab_size

    @property
    def limits(self) -> Limits:
        most_tokens, server = self.tokenizer.most_tokens, self.plan.settings.server
        stores = server.store_bytes > 0
        return Limits(self.model, server.max_n, self.max_len, self.vocab_size, most_tokens, stores)

    @property
    def why_not(self) -> str | None:
        """Why it takes no requests; ``None``: it does."""
        return self.supervisor.not_ready() or ("engine draining" if self.draining else None)

    @property
    def identity(self) -> str:
        """See :attr:`engine.loop.messages.EngineInfo.identity`; empty: it has not said yet."""
        return self.client.info.identity if self.client.info else ""

    @property
    def staying(self) -> dict[str, int]:
        """Sequences that have not left it while it drains, by reason."""
        return dict(Counter(sending.stays for sending in self.sendings if sending.stays)) if self.draining else {}

    @property
    def is_over(self) -> bool:
        """It will take no requests any more, unless somebody starts it."""
        return self.state in ("failed", "stopped")

    @property
    def takes_requests(self) -> bool:
        return self.why_not is None

    @property
    def view(self) -> EngineView:
        """What a router sees."""
        stats, load = self.client.stats, self.load
        return EngineView(
            self.id,
            self.model,
            self.takes_requests,
            stats.running,
            stats.waiting,
            stats.kv_used,
            load.sequences,
            load.queued_tokens,
            load.running_tokens,
            self.plan.block_size,
            self.supervisor.starts,
        )

    @property
    def pid(self) -> int | None:
        """Of its process; ``None``: there is none."""
        info = self.client.info
        return info.pid if info is not None and self.client.alive else None

    @property
    def host(self) -> str | None:
        """An address of the machine that :attr:`pid` is on, where it was started from elsewhere."""
        info = self.client.info
        return (info.host or None) if info is not None and self.client.alive else None

    @property
    def cached_blocks(self) -> int:
        """KV blocks that its prefix cache alone holds."""
        return sum(group.cached for group in self.client.stats.blocks)

    @property
    def cost(self) -> StepCost | None:
        """What its steps cost; ``None``: it has not said yet."""
        report = self.client.stats.step_cost
        return None if report is None else report.cost

    def prefill_s(self, tokens: int) -> float | None:
        """How long it computes on so many prompt tokens; ``None``: nothing was measured yet."""
        return prefill_s(self.cost, tokens, self.plan.scheduler.token_budget)

    def drain(self) -> None:
        """Give it no more requests; what it has goes on at another engine, where one takes it: call it again when
        another one may."""
        self.draining = True
        for sending in tuple(self.sendings):
            sending.leave()

    def publish_to(self, publish: Callable[[Sequence[Event]], None]) -> None:
        """Have the engine's events published: they carry its id from here on."""
        if self.id == DEFAULT_ENGINE:  # as they come
            self.client.on_events(publish)
        else:
            self.client.on_events(lambda events: publish([replace(event, engine=self.id) for event in events]))

    def count(self, events: Sequence[Event]) -> None:
        """Count events of this engine. Call on the thread of the event bus."""
        self.counters.add(events)
        self.latency.add(events)
        self.history.add(events)

    def check(self) -> None:
        """Raises :class:`ApiError` ``unavailable`` unless the engine can take work."""
        if self.why_not is not None:
            raise not_ready(self.why_not)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a few tokens from anywhere in a prompt."""
        table = self.tokenizer.token_bytes
        return b"".join([table[token] for token in tokens]).decode(errors="replace")


def count_for(engines: Mapping[str, EngineHandle], events: Sequence[Event]) -> None:
    """Count each event once: for the engine that it names, and what is the server's for the first one. Call on the
    thread of the event bus."""
    first = next(iter(engines))
    of_engine: dict[str, list[Event]] = {name: [] for name in engines}
    for event in events:
        if (mine := of_engine.get(getattr(event, "engine", first))) is not None:
            mine.append(event)
    for name, mine in of_engine.items():
        engines[name].count(mine)


def not_ready(reason: object) -> ApiError:
    """``unavailable``: no work is taken now."""
    return ApiError("unavailable", f"Not ready: {reason}.", code="not_ready", retry_after_s=2)
