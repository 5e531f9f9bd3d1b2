"""What is sent, by the flags of every command that sends requests."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from engine_lab.bench.distribution import Distribution, parse_distribution
from engine_lab.shared.argument_types import number, parsed, share, whole

DEFAULT_VOCAB = 1000


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is sent, and when."""

    concurrency: int
    """Of a closed loop."""
    rate: float | None
    """Requests per second; ``None``: closed loop with ``concurrency``, or the arrivals of a trace."""
    prompt_tokens: Distribution
    output_tokens: Distribution
    shared_prefix: float
    text_file: str | None
    prompt_ids: int | None
    """Vocabulary size for prompts of random token ids; ``None``: text prompts."""
    endpoint: str
    ignore_eos: bool
    seed: int
    timeout_s: float


def add_prompt_flags(group: argparse._ArgumentGroup, tokens: str = "128", shared_prefix: float = 0.0) -> None:
    """What prompts and answers are, with these defaults: of every command that sends some."""
    add, length = group.add_argument, parsed(parse_distribution)
    add("--prompt-tokens", type=length, default=tokens, metavar="LENGTH", help="tokens of a prompt (%(default)s)")
    add("--output-tokens", type=length, default="64", metavar="LENGTH", help="most tokens of an answer (%(default)s)")
    add(
        "--shared-prefix",
        type=share,
        default=shared_prefix,
        metavar="SHARE",
        help="share of a prompt common to all, 0 to 1 (%(default)g)",
    )
    add("--text", metavar="FILE", help="cut prompts from this text (default: random words)")
    add(
        "--prompt-ids",
        type=whole(2),
        nargs="?",
        const=DEFAULT_VOCAB,
        metavar="VOCAB",
        help=f"prompts are random token ids below VOCAB ({DEFAULT_VOCAB}): exact lengths",
    )
    add("--ignore-eos", action="store_true", help="ask for outputs of full length")


def add_run_flags(
    group: argparse._ArgumentGroup, requests: int, tokens: str = "128", shared_prefix: float = 0.0
) -> None:
    """The load of every run, of commands that make many: it is a closed or an open loop of so many requests."""
    add = group.add_argument
    add("--concurrency", type=whole(1), metavar="N", help="closed loop: N at once (1)")
    add("--rate", type=number(1e-6), metavar="R", help="open loop: R per second, Poisson")
    add("--requests", type=whole(1), default=requests, metavar="N", help="requests of a run (%(default)s)")
    add_prompt_flags(group, tokens, shared_prefix)
    add("--endpoint", choices=("chat", "completions"), help="default: chat")
    add("--seed", type=int, default=0, metavar="N", help="seeds prompts, lengths, arrivals and orders (%(default)s)")
    add("--timeout", type=number(0.001), default=600.0, metavar="S", help="per request (%(default)g)")


def run_fields(flags: argparse.Namespace) -> dict[str, Any]:
    """Fields of :class:`LoadOptions`, by the flags above. Raises ``ValueError`` when they contradict each other."""
    if flags.rate is not None and flags.concurrency is not None:
        raise ValueError("--rate (open loop) and --concurrency (closed loop) exclude each other")
    return load_fields(flags, flags.rate)


def load_fields(flags: argparse.Namespace, rate: float | None) -> dict[str, Any]:
    """Fields of :class:`LoadOptions`. Raises ``ValueError`` when flags contradict each other."""
    return {
        "concurrency": flags.concurrency or 1,
        "rate": rate,
        "prompt_tokens": flags.prompt_tokens,
        "output_tokens": flags.output_tokens,
        "shared_prefix": flags.shared_prefix,
        "text_file": flags.text,
        "prompt_ids": flags.prompt_ids,
        "endpoint": endpoint_of(flags),
        "ignore_eos": flags.ignore_eos,
        "seed": flags.seed,
        "timeout_s": flags.timeout,
    }


def endpoint_of(flags: argparse.Namespace) -> str:
    """Raises ``ValueError`` where it does not take the prompts that are asked for."""
    if flags.endpoint == "chat" and flags.prompt_ids is not None:
        raise ValueError("--prompt-ids needs --endpoint completions: the chat endpoint takes no token ids")
    return flags.endpoint or ("chat" if flags.prompt_ids is None else "completions")
