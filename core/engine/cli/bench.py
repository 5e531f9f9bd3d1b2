"""``engine bench``: the load generator has its own flags and no overrides."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from engine.cli.command import Command


class _Bench(Command):
    """Hands all words over."""

    __slots__ = ()

    def main(self, argv: Sequence[str]) -> int:
        from engine.benchmark.main import main

        return main(list(argv))


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    raise AssertionError("engine bench reads its own flags")


COMMAND = _Bench("bench", "Measure a running OpenAI-compatible server.", _run, takes_overrides=False)
