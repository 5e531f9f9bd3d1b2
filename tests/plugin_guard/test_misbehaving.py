"""No plugin corrupts memory, ends the server or is served silently wrong: each is told by name, with the cause."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import structlog

from engine.assembly.assemble import assemble
from engine.assembly.plan import EnginePlan
from engine.assembly.values import class_path
from engine.contracts.request import EngineRequest, SamplingParams
from engine.contracts.slots import SLOTS
from engine.http.server import Server
from engine.plugin_guard.calls import named
from engine.startup.build import build_engine
from engine.startup.child import failure
from tests.selection import few

from ..http.fakes import Running, chat
from ..kernels import tiny
from ..service.fakes import HELLO, DirectRouter, MemoryExporter, ScriptedClient, in_loop, make_plan, make_tokenizer
from .misbehaving import PLUGINS

ORIGIN = "engine-bad 0.3.0"
BASE = ("quantizer=none", "kv_allocator=paged", "scheduler=continuous", "attention_kernel=torch")
"""What the plugins derive from: their configuration is that of these."""
ENGINE = [(slot, plugin) for slot, plugin in PLUGINS if not SLOTS[slot].in_api]
API = [(slot, plugin) for slot, plugin in PLUGINS if SLOTS[slot].in_api]


def who(slot: str, plugin: type[Any]) -> str:
    return f"{slot}={plugin.__name__.lower()} (from {ORIGIN})"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("model"))


@cache
def base_plan(path: Path, drafter: str) -> EnginePlan:
    settings = ("device=cpu", "threads=1", "exporter=[]", "scheduler.token_budget=64", "scheduler.max_requests=8")
    return assemble([f"model.path={path}", *settings, *BASE, *drafter.split()])


def plan_with(path: Path, slot: str, plugin: type[Any]) -> EnginePlan:
    """A plan that selects a plugin nobody installed."""
    plan = base_plan(path, "drafter=early_exit drafter.layers=1" if slot == "drafter" else "drafter=none")
    name, factory = plugin.__name__.lower(), class_path(plugin)
    choice = replace(plan.choice(slot), name=name, factory=factory, origin=ORIGIN)
    return replace(plan, slots=plan.slots | {slot: (choice,)})


def outcome(plan: EnginePlan) -> str | list[tuple[int, ...]]:
    """What is said of an engine that does not start, breaks or fails requests; or what it answers."""
    try:
        core = build_engine(plan).core
    except Exception as error:
        refused = failure(error)
        assert refused.refused, "a plugin that cannot be used is a configuration that cannot run"
        return refused.error
    prompts, tokens, errors = [(5, 6, 7, 5, 6, 7), tuple(range(1, 100)), (9,)], {}, []
    try:
        for i, prompt in enumerate(prompts):
            core.submit(EngineRequest(f"r{i}", prompt, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)))
        while core.has_work:
            for out in core.step().outputs:
                tokens[out.request_id] = tokens.get(out.request_id, ()) + out.tokens
                errors += [out.error] * bool(out.error)
    except Exception as error:
        return failure(error).error
    core.close()
    return "; ".join(errors) if errors else [tokens[f"r{i}"] for i in range(len(prompts))]


def ids(found: tuple[str, type[Any]]) -> str:
    return f"{found[0]}-{found[1].__name__}"


@few(50)
@pytest.mark.parametrize("found", ENGINE, ids=ids)
def test_a_plugin_of_the_engine_that_breaks_its_contract_is_named_with_the_cause(
    found: tuple[str, type[Any]], model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    slot, plugin = found
    said = outcome(plan_with(model, slot, plugin))
    assert isinstance(said, str), f"served, with {said}"
    assert re.search(plugin.says, said, re.DOTALL), said
    if getattr(plugin, "is_named", True):
        assert who(slot, plugin) in said, said
    if " raised " in plugin.says:
        assert "Traceback" in capfd.readouterr().err, "the cause belongs in the log"


def test_the_plugins_that_they_derive_from_serve(model: Path) -> None:
    from .misbehaving import drafters, quantizers

    plain = outcome(base_plan(model, "drafter=none"))
    assert isinstance(plain, list) and all(len(tokens) == 12 for tokens in plain)
    for slot, plugin in (("quantizer", quantizers.Plain), ("drafter", drafters.Host), ("drafter", drafters.Device)):
        assert outcome(plan_with(model, slot, plugin)) == plain, plugin


@pytest.mark.parametrize("found", API, ids=ids)
def test_a_plugin_of_the_server_that_breaks_its_contract_is_named_in_the_log(found: tuple[str, type[Any]]) -> None:
    slot, plugin = found
    built = named(plugin(None, None), who(slot, plugin), (SLOTS[slot].protocol, *SLOTS[slot].optional))
    router, exporter = (built, MemoryExporter()) if slot == "router" else (DirectRouter(), MemoryExporter())
    exporters = [built, exporter] if slot == "exporter" else [exporter]

    @in_loop
    async def serve() -> None:
        client = ScriptedClient(HELLO)
        server = Server(make_plan(), {"default": client}, router, exporters, make_tokenizer(), say=lambda line: None)
        await server.listen()
        await server.state.engine.supervisor.start()
        running = Running(server, client, router, exporter)
        status, _, body = await running.post("/v1/chat/completions", chat())
        assert status == (200 if slot == "exporter" or hasattr(plugin, "serves") else 500), body
        assert slot.encode() not in body or b"from engine" not in body, "clients hear nothing of plugins"
        assert (await running.get("/health"))[0] == 200
        page = await running.get("/metrics")
        assert page[0] == 200 and b"engine_events_total" in page[2], "others' pages are shown"
        await server.close()
        assert exporter.closed and (exporter.events or status != 200), "others get their events"

    with structlog.testing.capture_logs() as logs:
        serve()
    said = "\n".join(f"{line.get('event')} {line.get('error', '')} {line.get('router', '')}" for line in logs)
    assert re.search(plugin.says, said) and who(slot, plugin) in said, said
    if " raised " in plugin.says:
        assert any(isinstance(line.get("exc_info"), BaseException) for line in logs)
