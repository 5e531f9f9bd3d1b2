"""Entry of ``engine bench``: options in, a measured server out."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from rich.console import Console, RenderableType

from engine.contracts.command import FAILED, INTERRUPTED, OK, USAGE
from engine_lab.bench import rates, versus
from engine_lab.bench.client import connected
from engine_lab.bench.compare import read_result, render_comparison
from engine_lab.bench.options import BenchOptions, options_of
from engine_lab.bench.page import page
from engine_lab.bench.probe import ProbeError
from engine_lab.bench.report import render
from engine_lab.bench.result import Result
from engine_lab.shared.errors import complain
from engine_lab.shared.output import check_writable, write_json

INVALID = 3
"""Exit code of a run in which the client itself lagged."""


def run(flags: argparse.Namespace) -> int:
    """Run ``engine bench`` with parsed flags; returns the exit status."""
    try:
        options = options_of(flags)
        if options.compare is not None:
            a, b = map(read_result, options.compare)
            Console().print(render_comparison(a, b))
            return OK
        for flag, file in (("--json", options.json_file), ("--html", options.html_file)):
            if file is not None:
                check_writable(file, flag=flag)
        result = asyncio.run(measure(options))
    except ValueError as error:
        return complain("bench", error, USAGE)
    except ProbeError as error:
        return complain("bench", error, FAILED)
    except KeyboardInterrupt:
        return complain("bench", "interrupted; nothing was measured", INTERRUPTED)
    Console().print(rendered(result))
    try:
        if options.json_file is not None:
            write_json(options.json_file, result)
        if options.html_file is not None:
            Path(options.html_file).write_text(page(result), encoding="utf-8")
    except OSError as error:
        return complain("bench", f"{error.filename}: {error.strerror or error}", FAILED)
    if result["interrupted"]:
        return INTERRUPTED
    if not result["requests"]["ok"]:
        return FAILED
    return OK if result["valid"] else INVALID


def rendered(result: Result) -> RenderableType:
    """For the screen, whatever was measured."""
    return {rates.SCHEMA: rates.render, versus.SCHEMA: versus.render}.get(result["schema"], render)(result)


async def measure(options: BenchOptions) -> Result:
    """Probe the server, warm it up, run the load or loads and sum up. Raises ``ProbeError`` or ``ValueError`` before
    any load when server or options cannot be used."""
    if options.versus is not None:
        return await versus.measure(options)
    async with connected(options) as client:
        if options.sweep is not None or options.rates:
            return await rates.measure(client)
        return await client.run(options)
