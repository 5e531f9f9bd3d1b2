"""Two tenants at one server with keys, stored answers (``router=semantic_cache``), gRPC and batches.

(a) ``acme`` asks questions until their answers are stored. ``eve`` asks the same with every salt, header, field and
endpoint that might pass for acme's, over gRPC and in a batch. Bar: no answer of hers was stored before or has cached
tokens beside those that all questions begin with, and her first tokens come no sooner than those to questions that
nobody asked. (b) ``eve`` asks first what ``acme`` will ask. Bar: he gets nothing of hers. (c) ``eve`` reads every page,
and looks for what others asked. (d) After requests that fail in every way, no text of a key is in the log, the metrics
or any page.

    python -m tools.attack.tenants
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tools.attack.client import CHAT, COMPLETIONS, Connection, Reply, once, request
from tools.attack.harness import Row, Target, arguments, run

NAMES = ("acme", "eve", "root")
KEYS = {name: f"{name}-{secrets.token_hex(16)}" for name in (*NAMES, "main", "wrong", "target")}
"""``main``: ``server.api_key``; ``wrong`` and ``target``: nobody's here."""
PAGES = (
    "/metrics", "/engine/plan", "/engine/stats", "/engine/counters", "/engine/latency", "/engine/history",
    "/engine/requests", "/engine/fleet", "/engine/scale", "/engine/findings", "/engine/expert_load", "/v1/models",
    "/v1/files", "/v1/batches", "/health", "/ready", "/version", "/",
)  # fmt: skip
START_S = 180.0
OWN_TOKENS = 16
"""Cached ones of one's own: all questions begin like that."""
TIMED = 12
"""Questions of each kind whose first tokens are timed."""
SOONER = 0.7
"""A cached prompt's first token comes in less of the time of one that is not."""


def bearer(name: str) -> str:
    return f"Authorization: Bearer {KEYS[name]}"


def question(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "bundled",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 12,
    } | fields


async def ask(target: Target, name: str, path: str, body: Any, *lines: str) -> Reply:
    return await once(target, request(path, body, bearer(name), *lines))


def leak(reply: Reply) -> str:
    """What of an answer says that somebody had it before; empty if nothing does."""
    if reply.status != 200:
        return ""
    found = reply.json()
    timings = found.get("timings") or {}
    said = json.dumps(timings.get("route") or {})
    cached = (found.get("usage") or {}).get("prompt_tokens_details") or {}
    number = cached.get("cached_tokens") or timings.get("cached_tokens") or timings.get("cache_n") or 0
    return "stored" if "stored" in said else f"{number} cached tokens" if number > OWN_TOKENS else ""


def salts() -> list[str | None]:
    """That might pass for those of acme."""
    digests = [hashlib.sha256(text.encode()).hexdigest()[:32] for text in ("acme\0", "acme", "acme\0acme")]
    return [None, "", "acme", "acme\0", "\0", "acme/", "tenant:acme", "../acme", *digests, KEYS["acme"], "eve\0acme"]


def longer(text: str) -> str:
    """More than a block of the prefix cache; what begins otherwise shares none."""
    return " ".join([text, *[f"Of the module json, part {number}." for number in range(20)], text])


def thefts() -> list[tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]]:
    """Where and what acme asks, what eve asks besides, and her header fields."""

    def chat(number: int) -> dict[str, Any]:
        return question(longer(f"Case {number}: what does load_secret do?"))

    found: list[tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = []
    for salt in salts():
        found.append((CHAT, chat(len(found)), {} if salt is None else {"cache_salt": salt}, ()))
    digest = hashlib.sha256(KEYS["acme"].encode()).hexdigest()
    for more, lines in (
        ({"user": "acme", "seed": 1}, ()),
        ({}, ("X-Tenant: acme", "X-User: acme", "X-Forwarded-For: acme")),
        ({}, (f"x-api-key: {digest}",)),
        ({}, (f"Cookie: key={KEYS['acme']}", f"Proxy-Authorization: Bearer {KEYS['acme']}")),
        ({"stream": False, "n": 1, "logprobs": False}, ()),
    ):
        found.append((CHAT, chat(len(found)), more, lines))
    text = longer("Please, what does load_secret do?")
    found.append((CHAT, question(text), {"messages": question(text.replace("Please, what", "What"))["messages"]}, ()))
    ids = {
        "model": "bundled",
        "prompt": [300 + number % 50 for number in range(200)],
        "temperature": 0,
        "max_tokens": 12,
    }
    found.append((COMPLETIONS, {**ids, "prompt": longer("Completed: ")}, {}, ()))
    found.append((COMPLETIONS, ids, {"echo": True}, ()))
    asked = {"model": "bundled", "input": longer("Responded?"), "temperature": 0, "max_output_tokens": 12}
    found.append(("/v1/responses", asked, {"store": False}, ()))
    messages = {"model": "bundled", "max_tokens": 12, "temperature": 0}
    found.append(("/v1/messages", messages | {"messages": question(longer("Sent?"))["messages"]}, {}, ()))
    found.append(
        ("/api/chat", messages | {"messages": question(longer("Pulled?"))["messages"], "stream": False}, {}, ())
    )
    return found


async def stolen(target: Target, address: str) -> list[Row]:
    """(a)"""
    found, own, ways = [], set[str](), thefts()
    for path, body, more, lines in ways:
        for _ in range(2):
            mine = await ask(target, "acme", path, body)
        own.add(leak(mine) if path != "/api/chat" else "stored")
        reply = await ask(target, "eve", path, body | more, *lines)
        if what := leak(reply):
            found.append(f"{path} {more} {lines}: {what}")
    found += await over_grpc(address, longer("Called: "))
    found += await in_batch(target, ways[0][1])
    for each in found:
        print(f"leak: {each}", file=sys.stderr)
    sane = "stored" in own and "" not in own
    rows = [
        Row("tenants: own answers come again", f"{len(ways)} asked twice", f"{sorted(own)}", "all", sane),
        Row("tenants: stolen answers", f"{len(ways) + 3} ways", f"{len(found)}", "0", sane and not found),
    ]
    return [*rows, await timed(target)]


async def timed(target: Target) -> Row:
    """Whether what acme asked comes sooner to eve."""
    asked = [longer(f"What is number {n}?") for n in range(2 * TIMED)]
    for text in asked[:TIMED]:
        await ask(target, "acme", CHAT, question(f"{text[::-1]} {text}"))
    took: dict[bool, list[float]] = {True: [], False: []}
    for n in range(TIMED):
        for known in (True, False):
            text = asked[n if known else TIMED + n]
            begun = time.monotonic()
            reply = await ask(target, "eve", CHAT, question(f"{text[::-1]} {text}", max_tokens=1))
            assert reply.status == 200, reply.body
            took[known].append(time.monotonic() - begun)
    known_ms, other_ms = (statistics.median(took[each]) * 1e3 for each in (True, False))
    ratio = known_ms / other_ms
    shown = f"{known_ms:.0f} ms against {other_ms:.0f} ms: {ratio:.2f}"
    return Row(
        "tenants: TTFT of another's questions", f"{TIMED} each", shown, f">= {SOONER}", ratio >= SOONER, measured=True
    )


async def over_grpc(address: str, text: str) -> list[str]:
    import grpc
    from smg_grpc_proto import vllm_engine_pb2 as pb
    from smg_grpc_proto import vllm_engine_pb2_grpc as stubs

    found = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = stubs.VllmEngineStub(channel)

        async def generate(metadata: list[tuple[str, str]], name: str) -> Any:
            params = pb.SamplingParams(temperature=0, max_tokens=12)
            asked = pb.GenerateRequest(request_id=name, text=text, sampling_params=params)
            try:
                return [each async for each in stub.Generate(asked, metadata=metadata)][-1].complete
            except grpc.aio.AioRpcError as error:
                return error

        for name in ("a", "b"):
            await generate([("authorization", f"Bearer {KEYS['acme']}")], name)
        eve = await generate(
            [("authorization", f"Bearer {KEYS['eve']}"), ("cache-salt", "acme"), ("x-tenant", "acme")], "e"
        )
        if isinstance(eve, grpc.aio.AioRpcError) or eve.cached_tokens > OWN_TOKENS:
            found.append(f"gRPC: {eve}")
        for wrong in ([], [("authorization", f"Bearer {KEYS['wrong']}")], [("authorization", KEYS["acme"])]):
            if not isinstance(await generate(wrong, "w"), grpc.aio.AioRpcError):
                found.append(f"gRPC: answered with {wrong}")
    return found


async def in_batch(target: Target, asked_for: dict[str, Any]) -> list[str]:
    """A line with a salt of its own: and eve's files are nobody else's."""
    line = {"custom_id": "1", "method": "POST", "url": CHAT, "body": asked_for | {"cache_salt": "acme\0batch"}}
    border, found = "attack", []
    parts = f'--{border}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{border}\r\n'
    parts += 'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    body = (parts + json.dumps(line) + f"\n\r\n--{border}--\r\n").encode()
    head = ["POST /v1/files HTTP/1.1", "Host: localhost", bearer("eve"), f"Content-Length: {len(body)}"]
    head.append(f"Content-Type: multipart/form-data; boundary={border}")
    file = (await once(target, "\r\n".join(head).encode() + b"\r\n\r\n" + body)).json()["id"]
    asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    if (status := (await ask(target, "acme", "/v1/batches", asked)).status) == 200:
        found.append("batch: of another tenant's file")
    name = (await ask(target, "eve", "/v1/batches", asked)).json()["id"]
    for path in (f"/v1/files/{file}", f"/v1/files/{file}/content", f"/v1/batches/{name}"):
        status = (await once(target, request(path, None, bearer("acme")))).status
        if status != 404:
            found.append(f"batch: {path} says {status} to another tenant")
    for _ in range(600):
        state = (await once(target, request(f"/v1/batches/{name}", None, bearer("eve")))).json()
        if state["status"] in ("completed", "failed", "expired", "cancelled"):
            break
        await asyncio.sleep(0.1)
    output = state.get("output_file_id")
    data = await once(target, request(f"/v1/files/{output}/content", None, bearer("eve")))
    answer = json.loads(data.body)["response"]["body"]
    if what := leak(Reply(200, {}, json.dumps(answer).encode())):
        found.append(f"batch: {what}")
    return found


async def poisoned(target: Target) -> list[Row]:
    """(b)"""
    wrong = []
    for number, salt in enumerate(salts()):
        text = longer(f"What does a dict of {number} do?")
        bad = question(text, logit_bias={str(token): 100 for token in range(300, 310)})
        for body in (bad, question(text), question(text, max_tokens=3)):
            await ask(target, "eve", CHAT, body | ({} if salt is None else {"cache_salt": salt}))
        if what := leak(await ask(target, "acme", CHAT, question(text))):
            wrong.append(f"{salt!r}: {what}")
    return [Row("tenants: poisoned answers", f"{len(salts())} salts", f"{wrong or 0}", "0", not wrong)]


async def spied(target: Target) -> list[Row]:
    """(c)"""
    seen = []
    for page in PAGES:
        reply = await once(target, request(page, None, bearer("eve")))
        open_to_all = page.startswith(("/engine", "/metrics"))
        if open_to_all and reply.status != 403:
            seen.append(f"{page}: {reply.status}")
        if b"load_secret" in reply.body or b"acme" in reply.body:
            seen.append(f"{page}: {reply.body[:200]!r}")
    return [Row("tenants: pages", f"{len(PAGES)} pages as eve", f"{seen or 'nothing'}", "nothing of acme", not seen)]


def broken() -> list[bytes]:
    """Requests that fail, with keys in them."""
    body, key = question("hi", max_tokens=1), KEYS["acme"]
    whole = request(CHAT, body, bearer("acme"))
    return [
        request(CHAT, body, bearer("wrong")),
        request(CHAT, body, bearer("acme"), bearer("eve")),
        request(CHAT, body, f"Authorization: {key}"),
        request(CHAT, body, f"Authorization: Basic {key}"),
        request(CHAT, body, f"Authorization Bearer {key}"),
        request(CHAT, body, f"Authorization: Bearer {key}\x00"),
        request(CHAT, body, f"Authorization: Bearer {key}\r {key}"),
        request(CHAT, body, f"Authorization: Bearer {key * 400}"),
        request(CHAT, body, f"{key}"),
        request(CHAT, body, bearer("acme"), "Content-Encoding: gzip"),
        request(CHAT, body, bearer("acme"), "X-SLO-Class: nothing"),
        request(CHAT, b"{", bearer("acme")),
        request(CHAT, {**body, "model": "nothing"}, bearer("acme")),
        request(CHAT, {**body, "messages": 7}, bearer("acme")),
        request(CHAT, {**body, "priority": -1}, bearer("acme")),
        request(f"{CHAT}?api_key={key}", body),
        request(f"{CHAT}?api_key={key}", body, bearer("acme")),
        request(f"/v1/{key}", body, bearer("acme")),
        request(f"/engine/plan?engine={key}", None, bearer("root")),
        request("/engine/plan", None, bearer("acme")),
        request("/metrics", None, bearer("main")),
        request(CHAT, body, bearer("main")),
        whole[:-5],
        b"\x16\x03\x01" + whole,
        whole.replace(b"HTTP/1.1", b"HTTP/9.9"),
        whole.replace(b"POST", f"P{key}".encode()),
    ]  # fmt: skip


async def told(target: Target) -> list[Row]:
    """(d)"""
    requests = broken()
    for data in requests:
        connection = await Connection.open(target)
        try:
            connection.writer.write(data)
            await asyncio.wait_for(connection.reply(), 3)
        except (ConnectionError, TimeoutError, ValueError, IndexError):
            pass
        finally:
            connection.close()
    assert target.log is not None
    texts = {"log": target.log.read_text(errors="replace")}
    for page in PAGES:
        texts[page] = (await once(target, request(page, None, bearer("root")))).body.decode(errors="replace")
    found = [f"{where}: key of {name}" for where, text in texts.items() for name, key in KEYS.items() if key in text]
    for where, text in texts.items():
        for line in text.splitlines():
            if any(key in line for key in KEYS.values()):
                print(f"key: {where}: {line[:300]}", file=sys.stderr)
    tried = f"{len(requests)} requests, {len(texts['log'].splitlines())} lines of log, {len(PAGES)} pages"
    return [Row("tenants: keys that are told", tried, f"{found or 'none'}", "none", not found)]


@asynccontextmanager
async def served(*overrides: str) -> AsyncIterator[tuple[Target, str]]:
    """A server with keys, and the address of its gRPC."""
    with tempfile.TemporaryDirectory(prefix="engine-attack-") as name:
        folder = Path(name)
        entries = [
            {"name": each, "sha256": hashlib.sha256(KEYS[each].encode()).hexdigest(), "admin": each == "root"}
            for each in NAMES
        ]
        (folder / "keys.json").write_text(json.dumps(entries))
        address, log = f"unix:{folder}/grpc", folder / "log"
        words = [
            sys.executable, "-m", "engine.cli.main", "serve", "server.port=0", f"server.keys={folder}/keys.json",
            f"server.api_key={KEYS['main']}", f"server.grpc.listen={address}", "router=semantic_cache",
            f"batches.path={folder}/batches", "batches.quiet_s=0", "router.audit=0", *overrides,
        ]  # fmt: skip
        with log.open("wb") as output:
            process = subprocess.Popen(words, stdout=output, stderr=output)
        try:
            ends = time.monotonic() + START_S
            while not (
                ready := [each for each in log.read_text(errors="replace").splitlines() if each.startswith("ready: ")]
            ):
                if process.poll() is not None or time.monotonic() > ends:
                    raise SystemExit(f"error: the server did not start:\n{log.read_text(errors='replace')[-2000:]}")
                await asyncio.sleep(0.1)
            yield Target("127.0.0.1", int(re.findall(r"http://[\w.]+:(\d+)", ready[0])[0]), process, log), address
        finally:
            process.terminate()
            process.wait()


async def main(options: argparse.Namespace) -> list[Row]:
    async with served(*options.overrides) as (target, address):
        rows = [*await stolen(target, address), *await poisoned(target), *await spied(target)]
        return [*rows, *await told(target)]


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, url=False).parse_args(), main))
