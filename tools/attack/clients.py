"""Client libraries against the server: each is asked for what it offers, and what the server lacks must be refused in
words that the library understands.

Give the interpreters of virtual environments that have ``openai``, ``langchain-openai`` or ``litellm``, and folders in
which ``npm install openai`` was run (``litellm`` needs ``mcp`` for tools and responses):

    python -m tools.attack.clients --python /tmp/openai2/bin/python --python /tmp/litellm/bin/python --node /tmp/node6
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tools.attack.harness import Row, arguments, run, target_of

ANSWER = "Serialize ``obj`` to a JSON formatted ``str``."
QUESTION = [{"role": "user", "content": "What does json.dumps do?"}]
ASK: dict[str, Any] = {"model": "bundled", "messages": QUESTION, "temperature": 0, "max_tokens": 80}
PROMPT = "class Counter(dict):\n    def"
COMPLETE: dict[str, Any] = {"model": "bundled", "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
LIBRARIES = ("langchain-openai", "litellm", "openai")
"""What is tried in an environment: the first of these that it has."""
LIMIT_S = 300

Cases = Iterator[tuple[str, Callable[[], Any], int]]
"""A name, what to call, and the status it must be refused with; 0: it must be answered."""


def check(condition: bool, what: Any) -> None:
    if not condition:
        raise AssertionError(what)


def check_logprobs(entries: Any) -> None:
    """Of three alternatives each."""
    for entry in entries:
        check(-math.inf < entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 3, entry)
        check(bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"] or "\ufffd" in entry["token"], entry)
    check("".join(entry["token"] for entry in entries).startswith(ANSWER), entries)


# Each library in its own environment ------------------------------------------------------------------------------


def openai_cases(url: str) -> Cases:
    import openai

    client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)

    def chat() -> None:
        done = client.chat.completions.create(**ASK, n=2)
        check([choice.index for choice in done.choices] == [0, 1], done)
        check(all(choice.message.content.startswith(ANSWER) for choice in done.choices), done)
        usage = done.usage
        check(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage)
        check(usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens, usage)

    def stream() -> None:
        chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        check(text == client.chat.completions.create(**ASK).choices[0].message.content, text)
        check(sum(choice.finish_reason is not None for chunk in chunks for choice in chunk.choices) == 1, chunks)
        check([chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True], chunks)

    def helper() -> None:
        with client.chat.completions.stream(**ASK) as events:
            check(events.get_final_completion().choices[0].message.content.startswith(ANSWER), "the stream helper")

    def logprobs() -> None:
        done = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3)
        check_logprobs([entry.model_dump() for entry in done.choices[0].logprobs.content])

    def models() -> None:
        check([model.id for model in client.models.list()] == ["bundled"], "the list")
        check(client.models.retrieve("bundled").object == "model", "the model")

    def completions() -> None:
        done = client.completions.create(**COMPLETE, echo=True, logprobs=2, n=2).choices
        found = done[0].logprobs
        check(len(done) == 2 and done[0].text.startswith(PROMPT), done)
        check(found.token_logprobs[0] is None and all(p <= 0 for p in found.token_logprobs[1:]), found)
        for token, offset in zip(found.tokens, found.text_offset):
            check(done[0].text.startswith(token, offset), (token, offset))
        parts = list(client.completions.create(**COMPLETE, stream=True))
        check(PROMPT + "".join(part.choices[0].text for part in parts) == done[0].text, parts)

    yield from (("chat", chat, 0), ("stream", stream, 0), ("stream helper", helper, 0))
    yield from (("logprobs", logprobs, 0), ("models", models, 0), ("completions", completions, 0))
    yield "tools", lambda: client.chat.completions.create(**ASK, tools=[TOOL]), 400
    yield "json_schema", lambda: client.chat.completions.create(**ASK, response_format=SCHEMA), 400
    yield "embeddings", lambda: client.embeddings.create(model="bundled", input="x"), 404
    yield "responses", lambda: client.responses.create(model="bundled", input="x"), 404
    yield "another model", lambda: client.chat.completions.create(**ASK | {"model": "other"}), 404
    yield "a bad value", lambda: client.chat.completions.create(**ASK | {"temperature": 3}), 400


def langchain_cases(url: str) -> Cases:
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    at: Any = {"base_url": url, "api_key": "unused", "model": "bundled", "max_retries": 0}
    chat = ChatOpenAI(**at, temperature=0, max_tokens=40)

    def invoke() -> None:
        done = chat.invoke(QUESTION[0]["content"])
        check(done.content.startswith(ANSWER), done)
        usage = done.usage_metadata
        check(usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], usage)
        check(usage["input_token_details"]["cache_read"] <= usage["input_tokens"], usage)

    def stream() -> None:
        whole = None
        for part in chat.stream(QUESTION[0]["content"], stream_usage=True):
            whole = part if whole is None else whole + part
        check(whole is not None and whole.content == chat.invoke(QUESTION[0]["content"]).content, whole)
        check(whole.usage_metadata["output_tokens"] > 0, whole)

    def logprobs() -> None:
        done = chat.bind(logprobs=True, top_logprobs=3).invoke(QUESTION[0]["content"])
        check_logprobs(done.response_metadata["logprobs"]["content"])

    def completions() -> None:
        complete = OpenAI(**at, temperature=0, max_tokens=8)
        check("".join(complete.stream(PROMPT)) == complete.invoke(PROMPT) != "", "stream and whole")

    yield from (("chat", invoke, 0), ("stream", stream, 0), ("logprobs", logprobs, 0), ("completions", completions, 0))
    yield "tools", lambda: chat.bind_tools([TOOL]).invoke("x"), 400
    yield "json_schema", lambda: chat.bind(response_format=SCHEMA).invoke("x"), 400
    embeddings = OpenAIEmbeddings(**at, check_embedding_ctx_length=False)
    yield "embeddings", lambda: embeddings.embed_query("x"), 404
    yield "responses", lambda: ChatOpenAI(**at, use_responses_api=True).invoke("x"), 404


def litellm_cases(url: str) -> Cases:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices over the network
    import litellm

    litellm.suppress_debug_info = True
    at: Any = {"api_base": url, "api_key": "unused", "num_retries": 0, "max_retries": 0}
    ask, complete = ASK | at | {"model": "openai/bundled"}, COMPLETE | at | {"model": "text-completion-openai/bundled"}

    def chat() -> None:
        done = litellm.completion(**ask)
        check(done.choices[0].message.content.startswith(ANSWER), done)
        check(done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens, done.usage)

    def stream() -> None:
        parts = [part.choices[0].delta.content or "" for part in litellm.completion(**ask, stream=True)]
        check("".join(parts) == litellm.completion(**ask).choices[0].message.content, parts)

    def logprobs() -> None:
        done = litellm.completion(**ask, logprobs=True, top_logprobs=3)
        check_logprobs(json.loads(json.dumps(done.choices[0].logprobs, default=lambda o: o.model_dump()))["content"])

    def completions() -> None:
        check(litellm.text_completion(**complete).choices[0].text != "", "a completion")

    yield from (("chat", chat, 0), ("stream", stream, 0), ("logprobs", logprobs, 0), ("completions", completions, 0))
    yield "tools", lambda: litellm.completion(**ask, tools=[TOOL]), 400
    yield "json_schema", lambda: litellm.completion(**ask, response_format=SCHEMA), 400
    yield "embeddings", lambda: litellm.embedding(model="openai/bundled", input="x", **at), 404
    yield "responses", lambda: litellm.responses(model="openai/bundled", input="x", **at), 404


CASES = {"openai": openai_cases, "langchain-openai": langchain_cases, "litellm": litellm_cases}


def inside(url: str) -> None:
    """Runs in an environment of its own: prints the library, and what came of each case."""
    library = next(name for name in LIBRARIES if _version(name))
    found = {"library": f"{library} {_version(library)}", "cases": {}}
    for name, call, refused in CASES[library](url):
        found["cases"][name] = outcome(call, refused)
    print("\n" + json.dumps(found))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def outcome(call: Callable[[], Any], refused: int) -> str:
    """What went wrong with a case; empty if nothing did."""
    try:
        call()
    except AssertionError as error:
        return f"wrong: {str(error)[:200]}"
    except Exception as error:
        status = getattr(error, "status_code", None)
        if status == refused and len(str(error)) > 20:
            return ""
        return f"{type(error).__name__} {status}: {str(error)[:200]}"
    return f"answered, expected a refusal with {refused}" if refused else ""


NODE = """
import OpenAI from "openai";
import { readFileSync } from "fs";
const [url, ask, complete, tool, schema, answer] = JSON.parse(process.env.CASES);
const client = new OpenAI({ baseURL: url, apiKey: "unused", maxRetries: 0 });
const check = (condition, what) => { if (!condition) throw new Error("wrong: " + JSON.stringify(what)); };
const text = async (stream, of) => { let all = ""; for await (const part of stream) all += of(part); return all; };
const cases = {
  chat: [async () => {
    const done = await client.chat.completions.create({ ...ask, n: 2 });
    check(done.choices.length === 2 && done.choices[1].message.content.startsWith(answer), done);
    check(done.usage.total_tokens === done.usage.prompt_tokens + done.usage.completion_tokens, done.usage);
  }, 0],
  stream: [async () => {
    const whole = (await client.chat.completions.create(ask)).choices[0].message.content;
    const stream = await client.chat.completions.create({ ...ask, stream: true });
    check(await text(stream, (part) => part.choices[0]?.delta.content ?? "") === whole, whole);
  }, 0],
  logprobs: [async () => {
    const done = await client.chat.completions.create({ ...ask, logprobs: true, top_logprobs: 3 });
    check(done.choices[0].logprobs.content.every((e) => e.logprob <= 0 && e.top_logprobs.length === 3), done);
  }, 0],
  models: [async () => {
    const ids = []; for await (const model of client.models.list()) ids.push(model.id);
    check(ids.length === 1 && (await client.models.retrieve(ids[0])).id === "bundled", ids);
  }, 0],
  completions: [async () => {
    const whole = (await client.completions.create({ ...complete, logprobs: 2 })).choices[0];
    check(whole.logprobs.tokens.join("") === whole.text && whole.text !== "", whole);
    const stream = await client.completions.create({ ...complete, stream: true });
    check(await text(stream, (part) => part.choices[0]?.text ?? "") === whole.text, whole);
  }, 0],
  tools: [() => client.chat.completions.create({ ...ask, tools: [tool] }), 400],
  json_schema: [() => client.chat.completions.create({ ...ask, response_format: schema }), 400],
  embeddings: [() => client.embeddings.create({ model: "bundled", input: "x" }), 404],
  responses: [() => client.responses.create({ model: "bundled", input: "x" }), 404],
};
const found = {};
for (const [name, [call, refused]] of Object.entries(cases)) {
  try {
    await call();
    found[name] = refused ? `answered, expected a refusal with ${refused}` : "";
  } catch (error) {
    const told = refused && error.status === refused && error.message.length > 20;
    found[name] = told ? "" : `${error.constructor.name} ${error.status}: ${error.message}`;
  }
}
const { version } = JSON.parse(readFileSync("node_modules/openai/package.json"));
console.log("\\n" + JSON.stringify({ library: `openai-node ${version}`, cases: found }));
"""


# The table --------------------------------------------------------------------------------------------------------


async def attack(options: argparse.Namespace) -> list[Row]:
    async with target_of(options) as target:
        url = f"http://{target.host}:{target.port}/v1"
        commands = [
            ([python, "-m", "tools.attack.clients", "--inside", url], None, {}) for python in options.python
        ] + [
            (["node", "--input-type=module", "-e", NODE], folder, {"CASES": json.dumps(_node_cases(url))})
            for folder in options.node
        ]
        return [await _row(*command) for command in commands]


def _node_cases(url: str) -> list[Any]:
    return [url, ASK, COMPLETE, TOOL, SCHEMA, ANSWER]


async def _row(command: list[str], folder: str | None, more: dict[str, str]) -> Row:
    # Nothing of this environment: the library is to be the other one's.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=environment | more, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            out, err = await process.communicate()
        found = json.loads(out.splitlines()[-1])
    except (TimeoutError, ValueError, IndexError):
        if process.returncode is None:
            process.kill()
            await process.wait()
            return Row(f"clients: {command[0]}", "everything", f"not done in {LIMIT_S} s", "all", False)
        said = [line for line in err.decode(errors="replace").splitlines() if "Error" in line]
        return Row(f"clients: {command[0]}", "everything", f"did not run: {' '.join(said)[:200]}", "all", False)
    wrong = {name: why for name, why in found["cases"].items() if why}
    shown = "; ".join(f"{name}: {why}" for name, why in wrong.items()) or "all as they should be"
    return Row(f"clients: {found['library']}", ", ".join(found["cases"]), shown, "all", not wrong)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--python", action="append", default=[], help="an interpreter; may be repeated")
    parser.add_argument("--node", action="append", default=[], help="a folder with node_modules; may be repeated")
    parser.add_argument("--inside", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.inside)
        return 0
    if not options.python and not options.node:
        parser.error("nothing to try: give --python or --node")
    return run(options, attack)


if __name__ == "__main__":
    sys.exit(main())
