"""Does ``engine doctor`` find planted faults? Starts an engine with each, sends its load, asks the doctor.

    python -m tools.benchmarks.doctor_faults [--faults FILE] [--only NAME,NAME] [--out DIR] [--no-remedy] [--runs N]

FILE is TOML; the built-in one is ``tools/benchmarks/doctor_faults.toml``. A fault:

    [[fault]]
    name = "time stamp in the system prompt"
    server = ["scheduler.max_requests=8"]   # overrides of engine serve; [] is the default engine
    expected = ["prefix_broken_early"]      # causes, of those that engine doctor --causes lists; any of them is a hit
    window = 5                              # seconds of each of the three windows (5)

    [[fault.load]]                          # several of them run side by side
    flags = "--concurrency 4 --prompt-tokens 600 --output-tokens 16 --shared-prefix 0.9 --ignore-eos"
    insert = "timestamp"                    # or "number", "id", "notes": put into each prompt, another one each time
    insert_at = 0.0                         # where: share of the prompt (0)
    reorder = 6                             # the shared part is cut into so many texts, in a new order for each prompt
    stream = false                          # ask for whole answers (true)
    max_tokens = 2000                       # asked for, whatever --output-tokens says
    burst = 8                               # with every_s: so many at once, instead of --rate and --concurrency
    every_s = 3.0
    read_bytes_per_s = 4000                 # a client that reads slowly, with little buffer
    leave_after_s = 0.5                     # a client that closes the connection
    count_chars = 60000                     # asks /tokenize for the tokens of texts of this length instead
    body = { logprobs = true, top_logprobs = 20 }    # more fields of the request

Further keys of a fault: ``neighbours = 2``, so many processes that compute beside the engine; ``proxy = true``, what
clients and the doctor ask is a proxy that passes an answer on when it is complete.

``flags`` are the load and request flags of ``engine bench``: --concurrency or --rate, --prompt-tokens, --output-tokens,
--shared-prefix, --endpoint, --prompt-ids, --ignore-eos, --temperature, --text, --seed. Lengths are N, uniform:LOW,HIGH
or lognormal:MEAN,SIGMA. A fault with ``expected = []`` is a healthy engine: nothing should be found.

The verdict is a hit if the first finding is an expected cause, ``second`` if a later one is, a miss if only others are
found, an abstention if nothing is. A finding ``machine_busy`` that was not planted is left out, and the row says what
others used: on such a machine rules that read step costs say nothing.

Where the first finding has overrides, engines without and with them are sent the recorded requests again, at the same
times, so many runs each in the order ABBA (``--runs``). They help if the finding's own metric falls by 5 % or more, and
the prediction is right if the ratio lies in its range: with one run on each side noise is included. P95 of TTFT, ITL
and E2E of each class of requests follow, the worst without -> the best with them; a class is harmed where one rose by
more than a tenth (ITL: and above 50 ms). Overrides that the doctor calls a trade are marked so. Evidence is kept in
DIR, a file for each fault.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import shlex
import socket
import sys
import tempfile
import time
import tomllib
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
from aiohttp import web
from msgspec.structs import replace as replace_struct

from engine.counters.declared import REQUESTS
from engine_lab.bench.options import BenchOptions, add_flags, options_of
from engine_lab.bench.probe import calibrate, find_model
from engine_lab.bench.run import text_of, workload_of
from engine_lab.bench.target import Target
from engine_lab.bench.workload import BenchRequest, arrivals, random_text
from engine_lab.doctor import evidence
from engine_lab.doctor.classes import P95s, harmed, in_words, long_from, p95s
from engine_lab.doctor.diagnosis import Diagnosis, Finding, diagnose
from engine_lab.doctor.evidence import Evidence
from engine_lab.doctor.figures import machine_of
from engine_lab.doctor.probe import probe
from engine_lab.doctor.recording import reading, record, watch
from engine_lab.doctor.replay import Replay, recorded
from engine_lab.doctor.rules import RULES
from engine_lab.doctor.shadow import overrides_of
from engine_lab.shared.live import LiveEngine, metrics_of
from engine_lab.shared.servers import Refused, Servers

OWN = Path(__file__).with_suffix(".toml")
WARM_S = 2.0
WARM, MOST_AGAIN, LOOK_S = 8, 200, 0.2
HELPS = 0.95
BUSY = "machine_busy"
COLUMNS = (
    *("fault", "expected", "named", "verdict", "override", "helps (ratio)", "in its range"),
    *("P95 of classes in ms, before -> after", "harmed", "machine"),
)
SMALL_BUFFER = 4096


@dataclass(frozen=True, slots=True)
class Load:
    """One stream of requests; fields as in the file."""

    flags: str
    insert: str = ""
    insert_at: float = 0.0
    reorder: int = 0
    stream: bool = True
    max_tokens: int = 0
    burst: int = 0
    every_s: float = 0.0
    read_bytes_per_s: int = 0
    leave_after_s: float = 0.0
    count_chars: int = 0
    body: dict[str, Any] = field(default_factory=dict)

    def options(self) -> BenchOptions:
        parser = argparse.ArgumentParser()
        add_flags(parser)
        return options_of(parser.parse_args(shlex.split(self.flags)))


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    server: tuple[str, ...]
    expected: tuple[str, ...]
    loads: tuple[Load, ...]
    window: float = 5.0
    neighbours: int = 0
    proxy: bool = False


def read_faults(path: Path) -> list[Fault]:
    """Raises ``ValueError`` for a file of another form."""
    known = {rule.cause for rule in RULES}
    faults = []
    for entry in tomllib.loads(path.read_text())["fault"]:
        loads = tuple(Load(**load) for load in entry.pop("load"))
        expected = tuple(entry.pop("expected"))
        if unknown := set(expected) - known:
            raise ValueError(f"{path}: {entry['name']}: no cause {sorted(unknown)}; engine doctor --causes lists them")
        faults.append(Fault(entry.pop("name"), tuple(entry.pop("server")), expected, loads, **entry))
    return faults


class Sender:
    """Sends the requests of one load to an engine, until it is cancelled."""

    def __init__(self, load: Load, session: aiohttp.ClientSession, url: str, model: str, chars: float) -> None:
        self._load, self._options, self._session = load, load.options(), session
        options = self._options
        self._target = Target(
            url, model, options.endpoint, temperature=options.temperature, ignore_eos=options.ignore_eos
        )
        self._rng = random.Random(options.seed)
        self._text = text_of(options)
        self._requests = workload_of(options, self._text, chars, "run", options.seed).requests()

    async def run(self) -> None:
        options, load = self._options, self._load
        async with asyncio.TaskGroup() as group:
            if not load.burst and options.rate is None:
                for _ in range(options.concurrency):
                    group.create_task(self._repeat())
                return
            times = self._bursts() if load.burst else arrivals(options.rate or 1.0, options.seed)
            began = time.monotonic()
            for at_s in times:
                await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
                group.create_task(self._send())

    def _bursts(self) -> Iterator[float]:
        return (number * self._load.every_s for number in itertools.count() for _ in range(self._load.burst))

    async def _repeat(self) -> None:
        while True:
            if not await self._send():
                await asyncio.sleep(0.05)  # refused

    async def _send(self) -> bool:
        body, url = self._body(next(self._requests)), self._target.url
        if self._load.count_chars:
            start = self._rng.randrange(1000)
            text = self._text[start : start + self._load.count_chars]
            body, url = {"prompt": text}, f"{self._target.base_url}/tokenize"
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(self._load.leave_after_s or None):
                async with self._session.post(url, json=body) as response:
                    async for piece in response.content.iter_chunked(SMALL_BUFFER):
                        if self._load.read_bytes_per_s:
                            await asyncio.sleep(len(piece) / self._load.read_bytes_per_s)
                    return response.status == 200
        return False

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        load = self._load
        most = load.max_tokens or request.max_tokens
        prompt = request.prompt if isinstance(request.prompt, tuple) else self._changed(request.prompt)
        return self._target.body(BenchRequest(request.index, prompt, most), stream=load.stream) | load.body

    def _changed(self, prompt: str) -> str:
        load = self._load
        if load.reorder:
            end = round(len(prompt) * self._options.shared_prefix)
            size = max(1, end // load.reorder)
            parts = [prompt[start : start + size] for start in range(0, end, size)]
            self._rng.shuffle(parts)
            prompt = "\n\n".join((*parts, prompt[end:]))
        if load.insert:
            at = round(len(prompt) * load.insert_at)
            prompt = f"{prompt[:at]}{self._inserted()}{prompt[at:]}"
        return prompt

    def _inserted(self) -> str:
        texts = {
            "timestamp": f" {time.strftime('%Y-%m-%d %H:%M:%S')}.{time.monotonic_ns() % 10**6:06d} ",
            "number": f" {self._rng.randrange(10**6)} ",
            "id": f" {uuid.UUID(int=self._rng.getrandbits(128))} ",
            "notes": f" {' '.join(str(self._rng.randrange(10**6)) for _ in range(40))} ",
        }
        return texts[self._load.insert]


def small_socket(address: Any) -> socket.socket:
    """With little room for what was not read yet."""
    made = socket.socket(address[0], address[1], address[2])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    return made


@contextlib.asynccontextmanager
async def sending(url: str, loads: Sequence[Load]) -> AsyncIterator[None]:
    """The loads run meanwhile."""
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        model = await find_model(session, url, None)
        found = await calibrate(session, Target(url, model, "chat"), random_text(0))
        tasks = []
        for load in loads:
            is_slow = bool(load.read_bytes_per_s)
            connector = aiohttp.TCPConnector(limit=0, socket_factory=small_socket if is_slow else None)
            size = SMALL_BUFFER if is_slow else 2**16
            own = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, read_bufsize=size))
            tasks.append(asyncio.create_task(Sender(load, own, url, model, found.chars_per_token).run()))
        try:
            await asyncio.sleep(WARM_S)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def neighbours(count: int) -> AsyncIterator[None]:
    """So many processes that compute all the time."""
    busy = [await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass") for _ in range(count)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            await each.wait()


@contextlib.asynccontextmanager
async def reached(url: str, session: aiohttp.ClientSession, proxy: bool) -> AsyncIterator[str]:
    """The address that clients have: the engine's, or that of a proxy that passes whole answers on."""
    if not proxy:
        yield url
        return

    async def whole(request: web.Request) -> web.Response:
        data, kind = await request.read(), {"Content-Type": "application/json"}
        async with session.request(request.method, f"{url}{request.path_qs}", data=data, headers=kind) as answer:
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", whole)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def again(
    servers: Servers, session: aiohttp.ClientSession, fault: Fault, more: Sequence[str], seen: Evidence
) -> Evidence:
    """Evidence of a fresh engine with more overrides under the requests that were seen, at the same times: a loop of
    clients that wait for answers would send a quicker engine more. Raises :class:`Refused`."""
    await servers.close()
    (url,) = await servers.keep([(overrides_of(seen.engine, more), 0)])
    engine, replay = LiveEngine(session, url), Replay(session, 0)
    requests = recorded(seen, MOST_AGAIN)
    async with neighbours(fault.neighbours):
        await replay.send(url, requests[:WARM], "warm-up", 0)
        before = await reading(engine)
        watched = await watch(engine, before, replay.send(url, requests, "measured", 1), LOOK_S)
    return replace_struct(seen, windows=[watched.figures], requests=watched.requests_since(before.at_s))


async def examined(servers: Servers, session: aiohttp.ClientSession, fault: Fault) -> Evidence:
    """Evidence of a fresh engine under the fault's load. Raises :class:`Refused`. An engine that fails by itself ends
    the benchmark: no such fault is planted."""
    await servers.close()
    (own,) = await servers.keep([(fault.server, 0)])
    async with reached(own, session, fault.proxy) as url, sending(url, fault.loads), neighbours(fault.neighbours):
        engine = LiveEngine(session, url)
        found = await record(engine, fault.window, probe=lambda: probe(session, url, None))
    ended = [each for each in await metrics_of(LiveEngine(session, own)) if each.name == REQUESTS.name]
    if failed := sum(each.value for each in ended if each.labels["finish_reason"] == "error"):
        raise SystemExit(f"{fault.name}: {failed:g} sequences ended with an error")
    return found


@dataclass(frozen=True, slots=True)
class Outcome:
    fault: Fault
    diagnosis: Diagnosis
    before: tuple[Evidence, ...]
    """Without any; the first evidence alone, where nothing was tried."""
    after: tuple[Evidence, ...] = ()
    """With the overrides of the first finding."""
    refused: str = ""

    @property
    def findings(self) -> list[Finding]:
        """Without what was not planted and is there: others compute on this machine."""
        planted = BUSY in self.fault.expected
        return [each for each in self.diagnosis.findings if planted or each.rule.cause != BUSY]

    @property
    def first(self) -> Finding | None:
        return next(iter(self.findings), None)

    @property
    def is_trade(self) -> bool:
        return self.first is not None and self.first.remedy.is_trade

    @property
    def ratio(self) -> float | None:
        """Of the first finding's metric, with its overrides / without."""
        if self.first is None:
            return None
        metric, sides = self.first.rule.metric, (self.before, self.after)
        before, after = ([f[metric] for each in side for f in each.windows if metric in f] for side in sides)
        return fmean(after) / fmean(before) if after and any(before) else None

    @property
    def classes(self) -> tuple[P95s, P95s]:
        """The worst of the runs without, the best of those with the overrides."""
        limit = long_from([each.prompt_tokens for each in self.before[0].requests] or [1])
        sides = ([p95s(each.requests, limit) for each in side] for side in (self.before, self.after))
        return _each(max, next(sides)), _each(min, next(sides))

    @property
    def harms(self) -> list[str]:
        return list(harmed(*self.classes))

    @property
    def machine(self) -> str:
        """Without and with the overrides."""
        return " -> ".join(", ".join(map(machine_in, side)) for side in (self.before, self.after) if side)

    @property
    def verdict(self) -> str:
        named = [finding.rule.cause for finding in self.findings]
        expected = self.fault.expected
        if not expected:
            return "right" if not named else "false alarm"
        if not named:
            return "abstention"
        return "hit" if named[0] in expected else "second" if set(named) & set(expected) else "miss"

    def row(self) -> tuple[str, ...]:
        first, ratio = self.first, self.ratio
        helps, within = "-", "-"
        if ratio is not None and first is not None:
            helps = f"{'yes' if ratio <= HELPS else 'no'} ({ratio:.2f})"
            within = f"{'yes' if first.remedy.low <= ratio <= first.remedy.high else 'no'}"
            within += f" ({first.remedy.low:.2f}-{first.remedy.high:.2f})"
        named = ", ".join(finding.rule.cause for finding in self.findings) or "none"
        if unsure := [each.rule.cause for each in self.diagnosis.abstentions]:
            named += f"; abstained: {', '.join(unsure)}"
        words = " ".join(first.remedy.overrides) if first else ""
        words += " (a trade)" if first and words and first.remedy.is_trade else ""
        helps = "refused" if self.refused else helps
        expected = " or ".join(self.fault.expected) or "none"
        before, after = self.classes
        classes = f"{in_words(before)} -> {in_words(after)}" if after else "-"
        harms = "; ".join(self.harms) or ("none" if after else "-")
        return self.fault.name, expected, named, self.verdict, words or "-", helps, within, classes, harms, self.machine


def machine_in(found: Evidence) -> str:
    """What it was like meanwhile."""
    known = [figures for figures in found.windows if "others_cpus" in figures]
    if not known:
        return "unknown"
    others, waiting = (
        fmean(figures.get(name, 0.0) for figures in known) for name in ("others_cpus", "waiting_for_core")
    )
    busy = " busy" if any(machine_of(figures).is_busy for figures in known) else ""
    return f"others {others:.1f} CPUs waited {waiting:.0%}{busy}"


def _each(pick: Callable[[list[float]], float], runs: Sequence[P95s]) -> P95s:
    """Of several runs, for each class and figure that all have."""
    if not runs:
        return {}
    return {
        name: {key: pick([run[name][key] for run in runs]) for key in figures if all(key in run[name] for run in runs)}
        for name, figures in runs[0].items()
        if all(name in run for run in runs)
    }


async def outcome(servers: Servers, session: aiohttp.ClientSession, fault: Fault, flags: Any, out: Path) -> Outcome:
    found = await examined(servers, session, fault)
    evidence.write(found, str(out / f"{fault.name.replace(' ', '_')}.json"))
    result = Outcome(fault, diagnose(found, RULES), (found,))
    first = result.first
    if flags.no_remedy or first is None or not first.remedy.overrides:
        return result
    runs: tuple[list[Evidence], list[Evidence]] = ([], [])
    try:
        for is_after in ((False, True, True, False) * flags.runs)[: 2 * flags.runs]:
            changes = first.remedy.overrides if is_after else ()
            runs[is_after].append(await again(servers, session, fault, changes, found))
    except Refused as error:
        return replace(result, refused=str(error))
    return replace(result, before=tuple(runs[0]), after=tuple(runs[1]))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=Path, default=OWN)
    parser.add_argument("--only", default="", help="names, or parts of them, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("doctor_faults"), help="where evidence goes (%(default)s)")
    parser.add_argument("--runs", type=int, default=1, help="with and without the override, in the order ABBA (1)")
    parser.add_argument("--no-remedy", action="store_true", help="do not try what the doctor proposes")
    flags = parser.parse_args()
    out = flags.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    wanted = [word for word in flags.only.split(",") if word]
    faults = [f for f in read_faults(flags.faults) if not wanted or any(word in f.name for word in wanted)]
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="doctor-faults-") as logs:
        async with aiohttp.ClientSession() as session:
            servers = Servers(session, (), Path(logs))
            try:
                for fault in faults:
                    server = (f"calibration={out}", *fault.server)
                    fault = replace(fault, server=server)
                    try:
                        outcomes.append(await outcome(servers, session, fault, flags, out))
                    except Refused as error:
                        print(f"| {fault.name} | the engine does not start: {error} |", flush=True)
                        continue
                    print(f"| {' | '.join(outcomes[-1].row())} |", flush=True)
            finally:
                await servers.close()
    counts: dict[str, int] = {}
    for each in outcomes:
        counts[each.verdict] = counts.get(each.verdict, 0) + 1
    tried = [each for each in outcomes if each.after]
    counts["overrides tried"] = len(tried)
    counts["a class harmed"] = sum(bool(each.harms) and not each.is_trade for each in tried)
    counts["a class harmed, called a trade"] = sum(bool(each.harms) and each.is_trade for each in tried)
    print(json.dumps(counts))


if __name__ == "__main__":
    asyncio.run(main())
