"""The command line of ``engine bench``."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from engine_lab.bench.distribution import ONE, Distribution, parse_distribution
from engine_lab.bench.load_options import LoadOptions, add_prompt_flags, load_fields
from engine_lab.bench.mixture import ServiceClass, read_mixture
from engine_lab.bench.pattern import CONSTANT, POISSON, Pattern, parse_pattern
from engine_lab.bench.slo import Slo, parse_slo
from engine_lab.bench.workload import Leave, parse_leave
from engine_lab.shared.argument_types import number, parsed, whole
from engine_lab.shared.simulation.traces.reading import FORMATS

DEFAULT_REQUESTS, DEFAULT_BURST = 100, 20
DEFAULT_STEP_S = 15.0
"""Of each load of several."""
DEFAULT_SWEEP = 5


@dataclass(frozen=True, slots=True)
class BenchOptions(LoadOptions):
    """A run, as asked for. Times in seconds."""

    url: str
    model: str | None
    api_key: str | None
    requests: int | None
    duration_s: float | None
    temperature: float
    usage_per_chunk: bool
    slo: Slo | None
    json_file: str | None
    nonce: str | None
    warmup: int
    tokenizer: str | None
    compare: tuple[str, str] | None
    grpc: str | None = None
    """Where the load is sent over gRPC; ``None``: over HTTP, to :attr:`url`."""
    rates: tuple[float, ...] = ()
    """Several rates, one after the other."""
    sweep: int | None = None
    """So many rates up to saturation, which is found first."""
    pattern: Pattern = POISSON
    ramp_s: float = 0.0
    most_running: int | None = None
    """Beside a rate."""
    trace: str | None = None
    trace_format: str = "auto"
    speed: float = 1.0
    classes: tuple[ServiceClass, ...] = ()
    prefixes: int = 1
    turns: Distribution = ONE
    think_s: float = 0.0
    leave: Leave | None = None
    slice_s: float | None = None
    html_file: str | None = None
    versus: str | None = None
    pairs: int = 10

    @property
    def load(self) -> str:
        """The load in words."""
        ramp = f", over {self.ramp_s:g} s" if self.ramp_s else ""
        rate = "" if self.rate is None else f", {self.rate:g} requests/s"
        if self.trace is not None:
            return f"trace {Path(self.trace).name}{rate or f', {self.speed:g} times as fast'}"
        if self.rate is not None:
            pattern = "" if self.pattern == POISSON else f", {self.pattern}"
            most = f", at most {self.most_running} running" if self.most_running else ""
            return f"open loop{rate}{pattern}{ramp}{most}"
        return f"closed loop, {self.concurrency} at once{ramp}"

    @property
    def has_turns(self) -> bool:
        """Whether requests have further turns."""
        return self.turns != ONE or any("turns" in each.changes for each in self.classes)


def options_of(flags: argparse.Namespace) -> BenchOptions:
    """The run that the parsed flags ask for. Raises ``ValueError`` when they contradict each other."""
    if flags.grpc is not None and (flags.endpoint == "chat" or flags.tokenizer is not None):
        raise ValueError("--grpc sends prompts and gets token ids: it takes no --endpoint chat and no --tokenizer")
    if flags.grpc is not None:
        flags.endpoint = "completions"
    check_load(flags)
    is_many = flags.sweep is not None or len(flags.rate) > 1
    requests, duration_s = flags.requests, flags.duration
    if requests is None and duration_s is None:
        if is_many:
            duration_s = DEFAULT_STEP_S
        elif flags.versus is not None:
            requests = DEFAULT_BURST
        elif flags.trace is None:
            requests = DEFAULT_REQUESTS
    options = BenchOptions(
        **load_fields(flags, flags.rate[0] if len(flags.rate) == 1 else None),
        url=base_url(flags.url),
        model=flags.model,
        api_key=flags.api_key,
        requests=requests,
        duration_s=duration_s,
        temperature=flags.temperature,
        usage_per_chunk=flags.usage_per_chunk,
        slo=flags.slo,
        json_file=flags.json,
        nonce=flags.nonce,
        warmup=flags.warmup,
        tokenizer=flags.tokenizer,
        compare=tuple(flags.compare) if flags.compare else None,
        grpc=flags.grpc,
        rates=tuple(flags.rate) if len(flags.rate) > 1 else (),
        sweep=flags.sweep,
        pattern=flags.arrivals or (CONSTANT if flags.sweep is not None else POISSON),
        ramp_s=flags.ramp,
        most_running=flags.concurrency if flags.rate else None,
        trace=flags.trace,
        trace_format=flags.format,
        speed=flags.speed,
        classes=() if flags.workload is None else read_mixture(flags.workload),
        prefixes=flags.prefixes,
        turns=flags.turns,
        think_s=flags.think,
        leave=flags.leave,
        slice_s=flags.slice,
        html_file=flags.html,
        versus=None if flags.versus is None else base_url(flags.versus, "--versus"),
        pairs=flags.pairs,
    )
    check_requests(options)
    return options


def check_requests(options: BenchOptions) -> None:
    """Raises ``ValueError`` where what is sent does not go with how, or when."""
    if options.has_turns and (options.prompt_ids is not None or options.grpc is not None):
        raise ValueError("--turns needs answers as texts: it takes neither --prompt-ids nor --grpc")
    leaves = options.leave is not None or any("leave" in each.changes for each in options.classes)
    if leaves and options.grpc is not None:
        raise ValueError("--leave closes HTTP connections: it takes no --grpc")
    if options.trace is not None and (options.classes or options.turns != ONE or leaves):
        raise ValueError("--trace has its own requests: it takes no --workload, --turns or --leave")
    if any(each.has_load for each in options.classes):
        if options.sweep is not None or options.rates:
            raise ValueError("--workload: a class with a load of its own goes with one load, not with several")
        if options.duration_s is None:
            raise ValueError("--workload: a class with a load of its own runs for a time: expected --duration S")


def base_url(url: str, flag: str = "--url") -> str:
    """Without ``/v1``, which most servers have their API at."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{flag} {url}: expected http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def check_load(flags: argparse.Namespace) -> None:
    """Raises ``ValueError`` where loads exclude each other."""
    loads = {"--sweep": flags.sweep is not None, "--trace": flags.trace is not None, "--rate R,R": len(flags.rate) > 1}
    named = [name for name, is_there in (*loads.items(), ("--versus", flags.versus is not None)) if is_there]
    if len(named) > 1 and named != ["--trace", "--versus"]:
        raise ValueError(f"{' and '.join(named)} exclude each other")
    if flags.trace is not None or flags.sweep is not None:
        name = "--trace" if flags.trace is not None else "--sweep"
        flag = "--concurrency" if flags.concurrency is not None else "--ramp" if flags.ramp else None
        if flag is not None:
            raise ValueError(f"{name} sets the load itself: it takes no {flag}")
    if flags.sweep is not None and flags.rate:
        raise ValueError("--sweep finds rates by itself: it takes no --rate; name them with --rate 1,2,4 alone")
    if flags.arrivals is not None and not flags.rate and flags.sweep is None:
        raise ValueError(f"--arrivals {flags.arrivals}: expected a --rate beside it")
    if flags.arrivals is not None and flags.trace is not None:
        raise ValueError(f"--arrivals {flags.arrivals}: those of a --trace are its own, or Poisson at --rate")
    if flags.versus is not None and flags.grpc is not None:
        raise ValueError("--versus compares servers over HTTP: it takes no --grpc")
    if flags.trace is None and flags.speed != 1.0:
        raise ValueError(f"--speed {flags.speed:g}: expected a --trace to play at it")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Every flag of ``engine bench``, each with its default in its help."""
    _add_server_flags(parser.add_argument_group("server"))
    _add_load_flags(parser.add_argument_group("load"))
    _add_request_flags(parser.add_argument_group("requests"))
    result = parser.add_argument_group("result")
    result.add_argument(
        "--slo", type=parsed(parse_slo), metavar="LIMITS", help="count goodput, for example ttft=200ms,itl=20ms"
    )
    result.add_argument("--slice", type=number(0.001), metavar="S", help="figures of every S seconds, too")
    result.add_argument("--json", metavar="FILE", help="write the result, every request included")
    result.add_argument("--html", metavar="FILE", help="write the result as one page with plots")
    result.add_argument(
        "--compare", nargs=2, metavar=("A.json", "B.json"), help="print two results side by side and stop"
    )


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--url", default="http://127.0.0.1:8000", help="any OpenAI-compatible server (%(default)s)")
    add("--model", metavar="NAME", help="default: the first one the server lists")
    add("--api-key", metavar="KEY", default=os.environ.get("ENGINE_API_KEY"), help="default: $ENGINE_API_KEY")
    add("--grpc", metavar="HOST:PORT", help="send the load over gRPC there (or to unix:PATH); the rest goes to --url")
    add("--endpoint", choices=("chat", "completions"), help="default: chat")
    add("--timeout", type=number(0.001), default=600.0, metavar="S", help="per request (%(default)g)")


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--concurrency", type=whole(1), metavar="N", help="closed loop: N at once (1); with --rate: at most N running")
    add("--rate", type=parsed(rates), default=(), metavar="R", help="open loop: R per second; several: --rate 1,2,4")
    add("--arrivals", type=parsed(parse_pattern), metavar="PATTERN", help="of --rate (poisson), of --sweep (constant)")
    add("--ramp", type=number(0.0), default=0.0, metavar="S", help="reach the load over the first S seconds (0)")
    add(
        "--sweep",
        type=whole(1),
        nargs="?",
        const=DEFAULT_SWEEP,
        metavar="N",
        help=f"find saturation by a closed loop, then N rates below it ({DEFAULT_SWEEP})",
    )
    add("--trace", metavar="FILE", help="play the requests of a trace when they came")
    add("--format", choices=("auto", *FORMATS), default="auto", help="of the trace (%(default)s)")
    add("--speed", type=number(1e-6), default=1.0, metavar="X", help="play the trace X times as fast (%(default)g)")
    add(
        "--requests",
        type=whole(1),
        metavar="N",
        help=f"stop after N requests ({DEFAULT_REQUESTS}, or --duration; all of a trace)",
    )
    add(
        "--duration",
        type=number(0.001),
        metavar="S",
        help=f"stop sending after S seconds (of several loads: each, {DEFAULT_STEP_S:g})",
    )
    add("--versus", metavar="URL", help="a second server: the same bursts to both in turns, as ratios with intervals")
    add("--pairs", type=whole(6), default=10, metavar="N", help="bursts to each of two servers (%(default)s)")
    add("--warmup", type=whole(0), default=1, metavar="N", help="unmeasured requests first (%(default)s)")


def _add_request_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    length = parsed(parse_distribution)
    add_prompt_flags(group)
    add("--prefixes", type=whole(1), default=1, metavar="N", help="different shared parts (%(default)s)")
    add("--turns", type=length, default=ONE, metavar="LENGTH", help="turns of a session, each with all before it (1)")
    add("--think", type=number(0.0), default=0.0, metavar="S", help="between an answer and the next turn (%(default)g)")
    add("--leave", type=parsed(parse_leave), metavar="SHARE@S", help="a share of clients goes away S seconds after")
    add("--workload", metavar="FILE", help="classes of requests that come mixed: TOML, a table a class")
    add("--temperature", type=number(0.0), default=0.0, metavar="T", help="sampling temperature (%(default)g)")
    add("--usage-per-chunk", action="store_true", help="ask how many tokens each chunk carries: exact ITL per token")
    add("--seed", type=int, default=0, metavar="N", help="seeds lengths, texts and arrival times (%(default)s)")
    add("--nonce", metavar="WORD", help="put into every prompt to keep runs out of each other's cache (random)")
    add("--tokenizer", metavar="PATH", help="tokenizer.json, for servers that report no usage")


def rates(text: str) -> tuple[float, ...]:
    """``1,2,4``, from the least on. Raises ``ValueError``."""
    found = tuple(number(1e-6)(part) for part in text.split(","))
    if list(found) != sorted(set(found)):
        raise ValueError(f"{text!r}: expected rates that grow, as in 1,2,4")
    return found
