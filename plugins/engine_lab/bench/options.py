"""The command line of ``engine bench``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from engine_lab.bench.distribution import Distribution, parse_distribution
from engine_lab.bench.slo import Slo, parse_slo

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
    usage_per_chunk: bool
    slo: Slo | None
    json_file: str | None
    seed: int
    nonce: str | None
    warmup: int
    timeout_s: float
    tokenizer: str | None
    compare: tuple[str, str] | None
    grpc: str | None = None
    """Where the load is sent over gRPC; ``None``: over HTTP, to :attr:`url`."""

    @property
    def load(self) -> str:
        """The load in words."""
        if self.rate is not None:
            return f"open loop, {self.rate:g} requests/s"
        return f"closed loop, {self.concurrency} at once"


def options_of(flags: argparse.Namespace) -> BenchOptions:
    """The run that the parsed flags ask for. Raises ``ValueError`` when they contradict each other."""
    if not flags.url.startswith(("http://", "https://")):
        raise ValueError(f"--url {flags.url}: expected http://HOST:PORT")
    if flags.endpoint == "chat" and flags.prompt_ids is not None:
        raise ValueError("--prompt-ids needs --endpoint completions: the chat endpoint takes no token ids")
    if flags.grpc is not None and (flags.endpoint == "chat" or flags.tokenizer is not None):
        raise ValueError("--grpc sends prompts and gets token ids: it takes no --endpoint chat and no --tokenizer")
    if flags.rate is not None and flags.concurrency is not None:
        raise ValueError("--rate (open loop) and --concurrency (closed loop) exclude each other")
    requests = flags.requests
    if requests is None and flags.duration is None:
        requests = DEFAULT_REQUESTS
    return BenchOptions(
        url=flags.url.rstrip("/").removesuffix("/v1").rstrip("/"),
        model=flags.model,
        api_key=flags.api_key,
        concurrency=flags.concurrency or 1,
        rate=flags.rate,
        requests=requests,
        duration_s=flags.duration,
        prompt_tokens=flags.prompt_tokens,
        output_tokens=flags.output_tokens,
        shared_prefix=flags.shared_prefix,
        text_file=flags.text,
        prompt_ids=flags.prompt_ids,
        endpoint=flags.endpoint or ("chat" if flags.prompt_ids is None and flags.grpc is None else "completions"),
        temperature=flags.temperature,
        ignore_eos=flags.ignore_eos,
        usage_per_chunk=flags.usage_per_chunk,
        slo=flags.slo,
        json_file=flags.json,
        seed=flags.seed,
        nonce=flags.nonce,
        warmup=flags.warmup,
        timeout_s=flags.timeout,
        tokenizer=flags.tokenizer,
        compare=tuple(flags.compare) if flags.compare else None,
        grpc=flags.grpc,
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Every flag of ``engine bench``, each with its default in its help."""
    _add_server_flags(parser.add_argument_group("server"))
    _add_load_flags(parser.add_argument_group("load"))
    _add_request_flags(parser.add_argument_group("requests"))
    result = parser.add_argument_group("result")
    result.add_argument(
        "--slo", type=parsed(parse_slo), metavar="LIMITS", help="count goodput, for example ttft=200ms,itl=20ms"
    )
    result.add_argument("--json", metavar="FILE", help="write the result, every request included")
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
    add("--concurrency", type=whole(1), metavar="N", help="closed loop: N at once (1)")
    add("--rate", type=number(1e-6), metavar="R", help="open loop: R per second, Poisson")
    add("--requests", type=whole(1), metavar="N", help=f"stop after N requests ({DEFAULT_REQUESTS}, or --duration)")
    add("--duration", type=number(0.001), metavar="S", help="stop sending after S seconds")
    add("--warmup", type=whole(0), default=1, metavar="N", help="unmeasured requests first (%(default)s)")


def _add_request_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    length = parsed(parse_distribution)
    add("--prompt-tokens", type=length, default="128", metavar="LENGTH", help="tokens of a prompt (%(default)s)")
    add("--output-tokens", type=length, default="64", metavar="LENGTH", help="most tokens of an answer (%(default)s)")
    add("--shared-prefix", type=share, default=0.0, metavar="SHARE", help="share of a prompt common to all, 0 to 1 (0)")
    add("--text", metavar="FILE", help="cut prompts from this text (default: random words)")
    add(
        "--prompt-ids",
        type=whole(2),
        nargs="?",
        const=DEFAULT_VOCAB,
        metavar="VOCAB",
        help=f"prompts are random token ids below VOCAB ({DEFAULT_VOCAB}): exact lengths",
    )
    add("--temperature", type=number(0.0), default=0.0, metavar="T", help="sampling temperature (%(default)g)")
    add("--ignore-eos", action="store_true", help="ask for outputs of full length")
    add("--usage-per-chunk", action="store_true", help="ask how many tokens each chunk carries: exact ITL per token")
    add("--seed", type=int, default=0, metavar="N", help="seeds lengths, texts and arrival times (%(default)s)")
    add("--nonce", metavar="WORD", help="put into every prompt to keep runs out of each other's cache (random)")
    add("--tokenizer", metavar="PATH", help="tokenizer.json, for servers that report no usage")


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
