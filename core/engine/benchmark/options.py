"""The command line of ``engine bench``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.benchmark.distribution import Distribution, parse_distribution
from engine.benchmark.slo import Slo, parse_slo

DEFAULT_REQUESTS = 100
DEFAULT_VOCAB = 1000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """A run, as asked for. Times in seconds."""

    url: str
    model: str | None
    api_key: str | None
    concurrency: int
    rate: float | None
    """Requests per second; ``None``: closed loop with ``concurrency``."""
    requests: int | None
    duration_s: float | None
    prompt_tokens: Distribution
    output_tokens: Distribution
    shared_prefix: float
    text_file: str | None
    prompt_ids: int | None
    """Vocabulary size for prompts of random token ids; ``None``: text prompts."""
    endpoint: str
    temperature: float
    ignore_eos: bool
    slo: Slo | None
    json_file: str | None
    seed: int
    nonce: str | None
    warmup: int
    timeout_s: float
    tokenizer: str | None
    compare: tuple[str, str] | None

    @property
    def load(self) -> str:
        """The load in words."""
        if self.rate is not None:
            return f"open loop, {self.rate:g} requests/s"
        return f"closed loop, {self.concurrency} at once"


def parse_options(argv: list[str]) -> BenchOptions:
    """Raises ``SystemExit`` as argparse does, with the message printed."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.endpoint == "chat" and args.prompt_ids is not None:
        parser.error("--prompt-ids needs --endpoint completions: the chat endpoint takes no token ids")
    if args.rate is not None and args.concurrency is not None:
        parser.error("--rate (open loop) and --concurrency (closed loop) exclude each other")
    requests = args.requests
    if requests is None and args.duration is None:
        requests = DEFAULT_REQUESTS
    return BenchOptions(
        url=args.url.rstrip("/").removesuffix("/v1").rstrip("/"),
        model=args.model,
        api_key=args.api_key,
        concurrency=args.concurrency or 1,
        rate=args.rate,
        requests=requests,
        duration_s=args.duration,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        shared_prefix=args.shared_prefix,
        text_file=args.text,
        prompt_ids=args.prompt_ids,
        endpoint=args.endpoint or ("chat" if args.prompt_ids is None else "completions"),
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        slo=args.slo,
        json_file=args.json,
        seed=args.seed,
        nonce=args.nonce,
        warmup=args.warmup,
        timeout_s=args.timeout,
        tokenizer=args.tokenizer,
        compare=tuple(args.compare) if args.compare else None,
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="engine bench",
        description="Measure the latency of an OpenAI-compatible server.",
        epilog="Exit status: 0 measured, 1 no request succeeded, 2 wrong usage, 3 the client lagged: run invalid. "
        "Lengths are N, uniform:LOW,HIGH or lognormal:MEAN,SIGMA.",
    )
    add = parser.add_argument
    server = parser.add_argument_group("server")
    server.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    server.add_argument("--model", help="default: the first one the server lists")
    server.add_argument("--api-key")
    server.add_argument("--endpoint", choices=("chat", "completions"), help="default: chat")
    server.add_argument("--timeout", type=number(0.001), default=600.0, metavar="S", help="per request")
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=whole(1), metavar="N", help="closed loop: N at once (default 1)")
    load.add_argument("--rate", type=number(1e-6), metavar="R", help="open loop: R per second, Poisson")
    load.add_argument("--requests", type=whole(1), metavar="N", help=f"default {DEFAULT_REQUESTS}")
    load.add_argument("--duration", type=number(0.001), metavar="S", help="stop sending after S seconds")
    load.add_argument("--warmup", type=whole(0), default=1, metavar="N", help="unmeasured requests first (1)")
    work = parser.add_argument_group("requests")
    work.add_argument("--prompt-tokens", type=parsed(parse_distribution), default="128", metavar="LENGTH")
    work.add_argument("--output-tokens", type=parsed(parse_distribution), default="64", metavar="LENGTH")
    work.add_argument("--shared-prefix", type=share, default=0.0, help="share of a prompt common to all, 0 to 1")
    work.add_argument("--text", metavar="FILE", help="cut prompts from this text (default: random words)")
    work.add_argument(
        "--prompt-ids",
        type=whole(2),
        nargs="?",
        const=DEFAULT_VOCAB,
        metavar="VOCAB",
        help=f"prompts are random token ids below VOCAB ({DEFAULT_VOCAB}): exact lengths",
    )
    work.add_argument("--temperature", type=number(0.0), default=0.0)
    work.add_argument("--ignore-eos", action="store_true", help="ask for outputs of full length")
    work.add_argument("--seed", type=int, default=0, help="seeds lengths, texts and arrival times")
    work.add_argument("--nonce", help="put into every prompt to keep runs out of each other's cache (random)")
    work.add_argument("--tokenizer", metavar="PATH", help="tokenizer.json, for servers that report no usage")
    add("--slo", type=parsed(parse_slo), help="count goodput, for example ttft=200ms,itl=20ms")
    add("--json", metavar="FILE", help="write the result, every request included")
    add("--compare", nargs=2, metavar=("A.json", "B.json"), help="print two results side by side and stop")
    return parser


def parsed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """An argparse type that keeps the message of a ``ValueError``."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def whole(low: int) -> Callable[[str], Any]:
    """An argparse type: a whole number of at least ``low``."""

    def parse(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < low:
            raise ValueError(f"{text!r}: expected a whole number of at least {low}")
        return int(text)

    return parsed(parse)


def number(low: float) -> Callable[[str], Any]:
    """An argparse type: a finite number of at least ``low``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value < float("inf"):
            raise ValueError(f"{text!r}: expected a number of at least {low:g}")
        return value

    return parsed(parse)


def share(text: str) -> float:
    value = number(0.0)(text)
    if value > 1.0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share from 0 to 1")
    return float(value)
