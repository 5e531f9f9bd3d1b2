"""``engine calibrate``: its flags; it takes no overrides."""

from __future__ import annotations

import argparse
import os

from engine.contracts.command import Command
from engine_lab.shared.flags import at_least, share

NOTES = """\
Asks both models of each prompt, greedily, and writes how often they agree, by how sure the smaller one is of its first
tokens: a low quantile of their log probabilities. gateway.cascade.NAME.table=FILE reads it. Both models are those of
one server, such as a gateway. Prompts are a question a line, or in a file named .jsonl objects with "question" or
"messages": they should be what the gateway will be asked.
Exit status: 0 done, 1 the server failed, 2 wrong usage."""


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine_lab.calibrate.main import run

    return run(flags)


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", metavar="URL", help="of the server, with or without /v1")
    add("--small", metavar="MODEL", required=True, help="the smaller model's name there")
    add("--large", metavar="MODEL", required=True, help="the larger model's name there")
    add("--prompts", metavar="FILE", required=True, help="what is asked: see below")
    add("--out", metavar="FILE", required=True, help="the table is written there as JSON")
    add("--tokens", type=at_least(1), default=24, help="of an answer's beginning (default 24; 16 to 32 are usual)")
    add("--quantile", type=share, default=0.25, help="of their log probabilities (default 0.25; below 1)")
    add("--max-tokens", type=at_least(1), default=256, help="most tokens of an answer (default 256)")
    add("--at-once", type=at_least(1), default=4, help="requests at once (default 4)")
    add("--api-key", metavar="KEY", default=os.environ.get("ENGINE_API_KEY"), help="default: $ENGINE_API_KEY")


COMMAND = Command(
    "Measure how often a smaller model agrees with a larger one, by its confidence: a table for gateway.cascade.",
    _run,
    _flags,
    takes_overrides=False,
    notes=NOTES,
)
