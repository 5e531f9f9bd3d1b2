"""Subcommands of ``engine``."""

from __future__ import annotations

from engine.contracts.command import CommandProvider
from engine.hookspecs import hookimpl


@hookimpl
def engine_command() -> list[CommandProvider]:
    return [
        CommandProvider(
            "alerts",
            "engine_plugins.command.alerts.command:COMMAND",
            "say what is wrong with a running engine; the rules for Prometheus",
        ),
        CommandProvider(
            "bench",
            "engine_plugins.command.bench.command:COMMAND",
            "measure TTFT, ITL and throughput of a running server",
        ),
        CommandProvider(
            "plan",
            "engine_plugins.command.plan.command:COMMAND",
            "does a model fit a device, how fast, at what price, what to change",
        ),
        CommandProvider(
            "bench-machine",
            "engine_plugins.command.bench_machine.command:COMMAND",
            "measure how fast this machine reads memory and multiplies",
        ),
        CommandProvider(
            "eval",
            "engine_plugins.command.eval.command:COMMAND",
            "measure what a plan costs in quality and what fits in memory",
        ),
        CommandProvider(
            "top",
            "engine_plugins.command.top.command:COMMAND",
            "watch a running engine: rates, percentiles, batch, KV, its slowest requests",
        ),
        CommandProvider(
            "chat",
            "engine_plugins.command.chat.command:COMMAND",
            "chat in the terminal, with the speed of each answer",
        ),
        CommandProvider(
            "dashboards",
            "engine_plugins.command.dashboards.command:COMMAND",
            "write Grafana dashboards of an engine's metrics",
        ),
        CommandProvider(
            "simulate",
            "engine_plugins.command.simulate.command:COMMAND",
            "simulate an engine under the load of a trace",
        ),
        CommandProvider(
            "ladder",
            "engine_plugins.command.ladder.command:COMMAND",
            "measure what each optimisation changes, one by one",
        ),
        CommandProvider(
            "doctor",
            "engine_plugins.command.doctor.command:COMMAND",
            "say why a running engine is slow, what to change, and what that should bring",
            finds="engine_plugins.command.doctor.page:findings",
        ),
    ]
