"""``engine worker``: be a further rank of an engine that another process serves."""

from __future__ import annotations

import argparse

from engine.contracts.command import Command
from engine.contracts.parallelism import TOKEN


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--join", metavar="HOST:PORT", required=True, help="where the engine waits for workers")
    parser.add_argument("--rank", type=int, default=-1, metavar="N", help="which rank to be; default: any that is left")


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine.service.joining import work

    return work(flags.join, flags.rank, {})


COMMAND = Command(
    "Be a further rank of an engine that waits for workers (parallelism=join).",
    _run,
    _flags,
    takes_overrides=False,
    notes=f"""\
The engine prints the whole command, with the secret in the environment variable {TOKEN}. It tells the worker
everything else: which model, which rank, how it is computed. The model's files must be there under the same path.
CUDA_VISIBLE_DEVICES chooses the worker's GPU. When the engine fails, the worker joins it again; when it is shut
down, or nobody has been there for a minute, the worker ends.""",
)
