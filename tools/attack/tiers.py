"""A gateway with ``router=tiered``, a cascade and shadows, and keys, before two servers of the bundled model.

Both have the same weights, so whichever model answers, a greedy text is that of a server that is asked directly. (a)
Bodies that might confuse the look, the choice of the model or the shadow. Bar: status, choices, texts and log
probabilities are those of a direct request. (b) Streams and whole answers whose clients leave during the look. Bar: no
load, row or block stays. (c) A key with ``max_sequences: 2`` sends eight requests, and prompts by the list. Bar: no
more than two are admitted, and a look or shadow is none of them. (d) Counters: each request is counted once.
(e) Either server is killed. Bar: the other one answers. (f) No text of a key is in any log or page.

    python -m tools.attack.tiers
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.attack.client import CHAT, COMPLETIONS, Connection, Reply, once, request
from tools.attack.harness import Row, Target, arguments, run

from engine.counters.gateway import LOOKS, REQUESTS

MODELS = ("small", "large")
PORTS = dict(zip(MODELS, (9461, 9462)))
KEYS = {name: f"{name}-{secrets.token_hex(16)}" for name in ("acme", "root", "targets")}
TABLE = {
    "model": "small", "reference": "large", "prompts": 100, "tokens": 8, "quantile": 0.25,
    "agreement": [[-9.0, 0.1], [-0.4, 0.95]],
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
START_S = 240.0


@dataclass(slots=True)
class Fleet:
    """The processes."""

    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    """``gateway`` and the models."""

    def start(self, name: str, *words: str) -> None:
        environment = {**os.environ, "TARGETS_KEY": KEYS["targets"]}
        with self.log(name).open("ab") as log:
            command = [sys.executable, "-m", "engine.cli.main", *words]
            self.running[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def serve(self, model: str) -> None:
        self.start(
            model, "serve", f"server.port={PORTS[model]}", f"model.name={model}", f"server.api_key={KEYS['targets']}"
        )
        self.targets[model] = Target("127.0.0.1", PORTS[model], self.running[model], self.log(model))

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def kill(self, name: str) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.running[name].pid, 9)
        self.running[name].wait()


def body(text: str = "What does json.dumps do?", **fields: Any) -> dict[str, Any]:
    return {
        "model": "auto",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 12,
    } | fields


def raw(text: str) -> bytes:
    """JSON that no encoder writes."""
    text = text.replace("TAIL", '"messages": MESSAGES, "temperature": 0, "max_tokens": 12')
    return text.replace("MESSAGES", json.dumps(body()["messages"])).encode()


def tricks() -> list[bytes]:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    fields: list[dict[str, Any]] = [
        {}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 5}, {"logprobs": False}, {"top_logprobs": 3},
        {"n": 2, "seed": 3, "temperature": 1}, {"n": 1, "seed": 3, "temperature": 1}, {"n": 0}, {"n": -1}, {"n": True},
        {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "required"}, {"tools": [TOOL], "tool_choice": "none"},
        {"response_format": schema}, {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": SCHEMA}},
        {"max_tokens": 1}, {"max_tokens": 0}, {"max_tokens": None}, {"max_tokens": True}, {"max_tokens": 1.5},
        {"max_tokens": None, "max_completion_tokens": 3}, {"min_tokens": 10}, {"min_tokens": 11, "ignore_eos": True},
        {"stop": ["a"]}, {"stop": "e"}, {"logit_bias": {"300": 100}}, {"stream_options": {"include_usage": True}},
        {"return_progress": True}, {"priority": 3}, {"priority": -1}, {"cache_salt": "x" * 200}, {"user": "u" * 5000},
        {"messages": []}, {"messages": 7}, {"messages": [{"role": "user", "content": "x" * 9000}]},
        {"model": "auto:latest"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": "def f(x):\n    return;\n" * 50}]},
        {"messages": [{"role": "system", "content": "\u2028" * 50}, {"role": "user", "content": "\U0001f600" * 9}]},
    ]  # fmt: skip
    found = [json.dumps(body() | one).encode() for one in fields]
    found += [
        raw('{"model": "large", "mod\\u0065l": "auto", TAIL}'),
        raw('{"model": "auto", "t\\u006fols": [{"type": "function"}], TAIL}'),
        raw('{"model": "auto", "logprobs": true, "logpr\\u006fbs": false, TAIL}'),
        raw('{"model": "auto", "n": 3, "\\u006e": 1, TAIL}'),
        raw('{"model": "auto", "messages": [{"role": "us\\u0065r", "content": "hi"}], "temperature": 0}'),
        raw('{"model": "auto", "messages": [{"role": "user", "content": "\\ud800"}], "temperature": 0}'),
        raw(' \n{"model":\t"auto" , TAIL } \n'),
        raw('{"model": "auto", "max_tokens": 1e1, "messages": MESSAGES, "temperature": 0}'),
    ]
    return found


async def ask(target: Target, data: Any, name: str = "root", path: str = CHAT, *lines: str) -> Reply:
    return await once(target, request(path, data, f"Authorization: Bearer {KEYS[name]}", *lines))


def shown(reply: Reply) -> Any:
    """What must be equal, whoever answers."""
    if reply.status != 200:
        return reply.status
    if reply.headers["content-type"].startswith("text/event-stream"):
        events = [json.loads(each[6:]) for each in reply.body.decode().split("\n\n") if each.startswith("data: {")]
        text: dict[int, str] = {}
        numbers, ends = 0, set()
        for choice in [choice for event in events for choice in event["choices"]]:
            text[choice["index"]] = text.get(choice["index"], "") + (choice["delta"].get("content") or "")
            numbers += len((choice.get("logprobs") or {}).get("content") or [])
            ends |= {(choice["index"], choice["finish_reason"])} if choice["finish_reason"] else set()
        usage = any(event.get("usage") for event in events)
        return text, numbers, sorted(ends), usage, reply.body.endswith(b"data: [DONE]\n\n")
    choices = reply.json()["choices"]
    return [
        (each["message"].get("content"), len((each.get("logprobs") or {}).get("content") or []), each["finish_reason"])
        for each in choices
    ]


async def tricked(fleet: Fleet) -> list[Row]:
    """(a)"""
    gateway, direct, wrong, models = fleet.targets["gateway"], fleet.targets["small"], [], set[str]()
    number = 0
    for data in tricks():
        for stream in (False, True):
            sent = data.rstrip().removesuffix(b"}") + (b', "stream": true}' if stream else b"}")
            here = await ask(gateway, sent)
            there = await ask(
                direct, sent.replace(b'"auto:latest"', b'"small"').replace(b'"auto"', b'"small"'), "targets"
            )
            number += 1
            models.add(here.headers.get("x-model", ""))
            if shown(here) != shown(there):
                wrong.append(f"{sent[:300]!r}: {shown(here)} but {shown(there)} {here.body[:200]!r}")
    for each in wrong:
        print(f"trick: {each}", file=sys.stderr)
    tried = f"{number} requests, answered by {sorted(filter(None, models))}"
    return [Row("tiers: tricks", tried, f"{len(wrong)} differ", "0", not wrong)]


async def leaving(fleet: Fleet, rng: random.Random) -> list[Row]:
    """(b)"""
    gateway = fleet.targets["gateway"]

    async def one(number: int) -> None:
        await asyncio.sleep(rng.random())
        connection = await Connection.open(gateway)
        data = body(f"What is {number}?", max_tokens=200, ignore_eos=True, stream=bool(number % 2))
        connection.writer.write(request(CHAT, data, f"Authorization: Bearer {KEYS['root']}"))
        await connection.writer.drain()
        await asyncio.sleep(rng.uniform(0.0, 0.4))
        connection.reset() if number % 3 else connection.close()

    await asyncio.gather(*[one(number) for number in range(60)])
    left = await settled(fleet)
    return [Row("tiers: left during the look", "60 requests", left or "all free", "all free", not left)]


async def settled(fleet: Fleet) -> str:
    """What is still held 30 s later."""
    ends, left = time.monotonic() + 30.0, "?"
    while left and time.monotonic() < ends:
        await asyncio.sleep(0.2)
        page = (
            await once(
                fleet.targets["gateway"], request("/engine/fleet", None, f"Authorization: Bearer {KEYS['root']}")
            )
        ).json()
        loads = {each["id"]: each["load"] for each in page["engines"] if any(each["load"].values())}
        held = {}
        for model in MODELS:
            stats = await once(
                fleet.targets[model], request("/engine/stats", None, f"Authorization: Bearer {KEYS['targets']}")
            )
            said = stats.json()
            found = {name: said[name] for name in ("running", "waiting", "rows_used") if said[name]}
            found |= {each["group"]: each["leased"] for each in said["blocks"] if each["leased"]}
            held |= {model: found} if found else {}
        left = f"{loads} {held}" if loads or held else ""
    return left


async def limited(fleet: Fleet) -> list[Row]:
    """(c)"""
    gateway = fleet.targets["gateway"]
    alone = [(await ask(gateway, body(f"Who is {n}?"), "acme")).status for n in range(6)]
    together = await asyncio.gather(
        *[ask(gateway, body(f"Where is {n}?", max_tokens=100, ignore_eos=True), "acme") for n in range(8)]
    )
    taken = sum(each.status == 200 for each in together)
    lists = []
    for path, data in (
        (COMPLETIONS, {"model": "auto", "prompt": ["a", "b", "c"], "max_tokens": 2}),
        (COMPLETIONS, {"model": "auto", "prompt": [[300], [301], [302]], "max_tokens": 2}),
        (COMPLETIONS, {"model": "auto", "prompt": ["a", "b"], "n": 2, "max_tokens": 2}),
        (CHAT, body(n=3)),
    ):
        lists.append((await ask(gateway, data, "acme", path)).status)
    return [
        Row("tiers: a key of two, one at a time", "6 requests", f"{alone}", "200", alone == [200] * 6),
        Row("tiers: a key of two, at once", "8 requests", f"{taken} answered", "2", taken == 2),
        Row("tiers: a key of two, several in one", "4 requests of 3 or 4", f"{lists}", "429", lists == [429] * 4),
    ]


async def counters(gateway: Target) -> dict[str, float]:
    reply = await once(gateway, request("/metrics", None, f"Authorization: Bearer {KEYS['root']}"))
    found: dict[str, float] = {}
    for line in reply.body.decode().splitlines():
        if line.startswith("engine_gateway_") and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0]] = found.get(name.partition("{")[0], 0.0) + float(value)
    return found


async def counted(fleet: Fleet) -> list[Row]:
    """(d)"""
    gateway, before = fleet.targets["gateway"], await counters(fleet.targets["gateway"])
    for number in range(12):
        assert (await ask(gateway, body(f"How is {number}?", max_tokens=4))).status == 200
    await settled(fleet)
    await asyncio.sleep(1.0)
    after = await counters(gateway)
    grown = {
        name: after[name] - before.get(name, 0.0)
        for name in after
        if name.endswith("_total") and after[name] != before.get(name, 0.0)
    }
    right = grown.get(REQUESTS.name) == grown.get(LOOKS.name) == 12
    return [Row("tiers: counters", "12 requests", f"{grown}", "12 requests, 12 looks", right)]


async def halves(fleet: Fleet) -> list[Row]:
    """(e)"""
    gateway, rows = fleet.targets["gateway"], []
    for model, other in (MODELS, MODELS[::-1]):
        fleet.kill(model)
        answers = [await ask(gateway, body(f"Why is {n}?", stream=bool(n % 2))) for n in range(6)]
        fine = all(each.status == 200 and each.headers.get("x-model") == other for each in answers)
        said = {(each.status, each.headers.get("x-model"), each.headers.get("x-model-reason")) for each in answers}
        rows.append(Row(f"tiers: {model} is down", "6 requests", f"{said}", f"{other} answers", fine))
        fleet.serve(model)
        await ready(fleet.targets[model])
        await asyncio.sleep(3.0)
    back = await ask(gateway, body("Back?"))
    return [*rows, Row("tiers: both are back", "1 request", f"{back.status}", "200", back.status == 200)]


async def told(fleet: Fleet) -> list[Row]:
    """(f)"""
    texts = {name: fleet.log(name).read_text(errors="replace") for name in fleet.targets}
    for name, key in (("gateway", "root"), ("small", "targets"), ("large", "targets")):
        for page in ("/metrics", "/engine/plan", "/engine/fleet", "/engine/names", "/engine/requests", "/v1/models"):
            reply = await once(fleet.targets[name], request(page, None, f"Authorization: Bearer {KEYS[key]}"))
            texts[name + page] = reply.body.decode(errors="replace")
    found = [f"{where}: {name}" for where, text in texts.items() for name, key in KEYS.items() if key in text]
    return [Row("tiers: keys that are told", f"{len(texts)} texts", f"{found or 'none'}", "none", not found)]


async def ready(target: Target) -> None:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        with suppress(OSError):
            if (await once(target, request("/ready"))).status == 200:
                return
        await asyncio.sleep(0.2)
    raise SystemExit(f"error: not ready: {target.log}")


@asynccontextmanager
async def served(overrides: Sequence[str]) -> AsyncIterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="engine-attack-") as name:
        fleet = Fleet(Path(name))
        (fleet.folder / "table.json").write_text(json.dumps(TABLE))
        entries = [
            {"name": "acme", "sha256": digest("acme"), "max_sequences": 2},
            {"name": "root", "sha256": digest("root"), "admin": True},
        ]
        (fleet.folder / "keys.json").write_text(json.dumps(entries))
        try:
            for model in MODELS:
                fleet.serve(model)
            for model in MODELS:
                await ready(fleet.targets[model])
            fleet.start(
                "gateway", "gateway", *[f"http://127.0.0.1:{port}" for port in PORTS.values()], "server.port=9460",
                f"server.keys={fleet.folder}/keys.json", "router=tiered", "gateway.models={auto: [small, large]}",
                f"gateway.cascade={{auto: {{table: {fleet.folder}/table.json, agreement: 0.9, streams: true}}}}",
                "gateway.shadow={auto: {share: 1.0}}", "gateway.key_env=TARGETS_KEY", *overrides,
            )  # fmt: skip
            fleet.targets["gateway"] = Target("127.0.0.1", 9460, fleet.running["gateway"], fleet.log("gateway"))
            await ready(fleet.targets["gateway"])
            yield fleet
        finally:
            for each in fleet.running:
                fleet.kill(each)


def digest(name: str) -> str:
    return hashlib.sha256(KEYS[name].encode()).hexdigest()


async def main(options: argparse.Namespace) -> list[Row]:
    async with served(options.overrides) as fleet:
        rows = [*await tricked(fleet), *await leaving(fleet, random.Random(options.seed)), *await limited(fleet)]
        return [*rows, *await counted(fleet), *await halves(fleet), *await told(fleet)]


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, url=False).parse_args(), main))
