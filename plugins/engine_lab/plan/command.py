"""``engine plan``: its flags."""

from __future__ import annotations

import argparse
import os

from engine.contracts.command import Command
from engine_lab.bench.slo import parse_slo
from engine_lab.plan.workload import DEFAULT, REQUESTS, parse_workload
from engine_lab.shared.argument_types import number, parsed, whole

NOTES = """\
Every figure says where it is from: measured (steps that an engine took on this machine), simulated (the engine's own
scheduler and KV allocator on a virtual clock), estimated (from data sheets and shapes), stated (prices), none (what it
follows from was not given: --price, or a rate) or unknown.
A model needs no weights to be planned: a folder with its config.json is enough.
WORKLOAD is in=LENGTH,out=LENGTH,rate=R,shared_prefix=SHARE; a LENGTH is N, uniform:LOW,HIGH or lognormal:MEAN,SIGMA.
(GET /engine/plan of a server is something else: the plugins and settings that it runs with.)
With --live and no overrides the plan is the server's own.
Exit status: 0 it fits, 1 it does not (with --live: a prediction has become worse, a median is more than 50 % off, or
the load is another one), 2 wrong usage.

  engine plan --device H100 --model path/to/model quantizer=fp8 --workload in=2000,out=300,rate=4 --slo ttft=1s,itl=30ms
  engine plan --device here
  engine plan --live http://127.0.0.1:8000"""


def _flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="PATH", help="short for model.path: bundled, a directory or a hub id")
    add("--device", default="here", metavar="NAME", help="here (default), or one of a table: H100, L40S, ...")
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--workload",
        type=parsed(parse_workload),
        metavar="WORKLOAD",
        help=f"default: {DEFAULT}; with --live: the latest requests of the server",
    )
    load.add_argument("--trace", metavar="FILE", help="requests of a recorded trace ('engine simulate' reads the same)")
    add("--slo", type=parsed(parse_slo), metavar="LIMITS", help="for example ttft=500ms,itl=50ms; kept by 95 %%")
    add("--price", type=number(0.0), metavar="USD", help="rent of one device per hour (default: the table's)")
    add("--calibration", metavar="FILE", help="what steps were measured to cost (default: estimated from the device)")
    add("--requests", type=whole(1), default=REQUESTS, metavar="N", help="simulated requests (%(default)s)")
    add("--thorough", action="store_true", help="simulate other overrides and layouts, too; takes half a minute")
    add("--seed", type=int, default=0, metavar="N", help="of lengths and arrival times (%(default)s)")
    add("--json", action="store_true", help="print JSON instead of tables")
    live = parser.add_argument_group("against a running server")
    live.add_argument("--live", metavar="URL", help="predict for this server and compare with what it measures")
    live.add_argument("--engine", metavar="ID", help="of a server with several: which one (the first)")
    live.add_argument("--baseline", metavar="FILE", help="where earlier errors are kept (default: in the cache folder)")
    live.add_argument(
        "--api-key", metavar="KEY", default=os.environ.get("ENGINE_API_KEY"), help="default: $ENGINE_API_KEY"
    )


def _run(flags: argparse.Namespace, overrides: list[str]) -> int:
    from engine_lab.plan.main import run

    return run(flags, overrides)


COMMAND = Command(
    "Plan before you rent or load: does it fit, how many requests at once, TTFT and ITL at your rate, the price, and "
    "which overrides to try.",
    _run,
    _flags,
    notes=NOTES,
)
