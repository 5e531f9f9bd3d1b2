"""Subcommands of ``engine``."""

from __future__ import annotations

from engine.contracts.command import CommandProvider
from engine.hookspecs import hookimpl


@hookimpl
def engine_command() -> list[CommandProvider]:
    return [
        CommandProvider(
            "alerts",
            "engine_lab.alerts.command:COMMAND",
            "say what is wrong with a running engine; the rules for Prometheus",
        ),
        CommandProvider(
            "bench",
            "engine_lab.bench.command:COMMAND",
            "measure TTFT, ITL and throughput of a running server",
        ),
        CommandProvider(
            "plan",
            "engine_lab.plan.command:COMMAND",
            "does a model fit a device, how fast, at what price, what to change",
        ),
        CommandProvider(
            "bench-machine",
            "engine_lab.bench_machine.command:COMMAND",
            "measure how fast this machine reads memory and multiplies",
        ),
        CommandProvider(
            "eval",
            "engine_lab.eval.command:COMMAND",
            "measure what a plan costs in quality and what fits in memory",
        ),
        CommandProvider(
            "calibrate",
            "engine_lab.calibrate.command:COMMAND",
            "measure when a smaller model answers as a larger one, for a gateway's cascade",
        ),
        CommandProvider(
            "top",
            "engine_lab.top.command:COMMAND",
            "watch a running engine: rates, percentiles, batch, KV, its slowest requests",
        ),
        CommandProvider(
            "fleet",
            "engine_lab.fleet.command:COMMAND",
            "show, drain and restart the engines behind a server, one by one",
        ),
        CommandProvider(
            "chat",
            "engine_lab.chat.command:COMMAND",
            "chat in the terminal, with the speed of each answer",
        ),
        CommandProvider(
            "dashboards",
            "engine_lab.dashboards.command:COMMAND",
            "write Grafana dashboards of an engine's metrics",
        ),
        CommandProvider(
            "simulate",
            "engine_lab.simulate.command:COMMAND",
            "simulate an engine under the load of a trace",
        ),
        CommandProvider(
            "ladder",
            "engine_lab.ladder.command:COMMAND",
            "measure what each optimisation changes, one by one",
        ),
        CommandProvider(
            "sweep",
            "engine_lab.sweep.command:COMMAND",
            "measure many plugin sets under one load, and name the best",
        ),
        CommandProvider(
            "tune",
            "engine_lab.tune.command:COMMAND",
            "find the plugin set for an SLO, prove it, and write it as a preset",
        ),
        CommandProvider(
            "doctor",
            "engine_lab.doctor.command:COMMAND",
            "say why a running engine is slow, what to change, and what that should bring",
            finds="engine_lab.doctor.page:findings",
        ),
    ]
