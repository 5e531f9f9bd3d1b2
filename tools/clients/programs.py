"""What each command-line client is told to do, in an empty folder of its own, and what it must show."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.attack.client import CHAT, ROOT, Connection, Reply, once, request
from tools.clients.cases import ANSWER, ASK, QUESTION, TOOL, check

ASKED = QUESTION[0]["content"]
TOKENIZER = str(ROOT / "core/engine/bundled")
"""A folder: the hub may be out of reach."""
STREAM = ASK | {"stream": True}
MESSAGES = "/v1/messages"
HOST = "127.0.0.1"
OUTPUT = "output.txt"
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Server:
    """A program that listens."""

    port: int
    host: str = HOST

    async def is_up(self) -> bool:
        try:
            (await Connection.open(self)).close()
        except OSError:
            return False
        return True

    async def ask(self, path: str, body: Any, key: str) -> Reply:
        return await once(self, request(path, body, f"Authorization: Bearer {key}"))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a program runs."""

    program: str
    url: str
    """Ends with ``/v1``."""
    folder: Path

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def write(self, name: str, content: Any) -> None:
        """As JSON, which is YAML too."""
        (self.folder / name).write_text(json.dumps(content) + "\n")

    def read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    async def version(self) -> str:
        """As the program tells it; empty if it does not."""
        try:
            found = re.search(r"\d+\.\d+[.\w]*", await self.run("--version"))
        except AssertionError:
            return ""
        return found[0] if found else ""

    async def run(self, *arguments: str, code: int = 0, **environment: str) -> str:
        """What it printed. Raises ``AssertionError`` unless it ends with the exit code in time."""
        async with self.started(*arguments, **environment) as process:
            try:
                await asyncio.wait_for(process.wait(), LIMIT_S)
            except TimeoutError:
                raise AssertionError(f"not done in {LIMIT_S:.0f} s: {self._end()}") from None
        check(process.returncode == code, f"exit code {process.returncode}: {self._end()}")
        return (self.folder / OUTPUT).read_text(errors="replace")

    @asynccontextmanager
    async def started(self, *arguments: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
        """Its process, which is killed with all that it started in the end."""
        with open(self.folder / OUTPUT, "wb") as output:
            process = await asyncio.create_subprocess_exec(
                self.program,
                *arguments,
                cwd=self.folder,
                env=self._environment() | environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    @asynccontextmanager
    async def listening(self, *arguments: str, **environment: str) -> AsyncIterator[Server]:
        """Its process as a server, told a port of its own. Raises ``AssertionError`` if it ends or takes too long."""
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            server = Server(probe.getsockname()[1])
        address = ("--host", HOST, "--port", str(server.port))
        async with self.started(*arguments, *address, **environment) as process:
            try:
                async with asyncio.timeout(LIMIT_S):
                    while not await server.is_up():
                        check(process.returncode is None, f"ended: {self._end()}")
                        await asyncio.sleep(0.1)
                    yield server
            except TimeoutError:
                raise AssertionError(f"not done in {LIMIT_S:.0f} s: {self._end()}") from None

    def _end(self) -> str:
        """Of what it printed, on one line."""
        return " ".join((self.folder / OUTPUT).read_text(errors="replace").split())[-300:]

    def _environment(self) -> dict[str, str]:
        # Nothing of this environment: the packages are to be its own.
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        ours = {"HOME": str(self.folder), "COLUMNS": "200", "OPENAI_API_KEY": "unused"}
        return kept | ours | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would fetch prices over the network


async def litellm(at: Place) -> None:
    """chat, stream, its Messages bridge plain and streamed, a tool that must be called"""
    key = "sk-of-this-test-alone"
    # To models of "openai/" its bridge sends responses.
    model = {"model": "hosted_vllm/bundled", "api_base": at.url, "api_key": "unused"}
    at.write("proxy.yaml", {"model_list": [{"model_name": "bundled", "litellm_params": model}]})
    async with at.listening("--config", "proxy.yaml", LITELLM_MASTER_KEY=key) as proxy:
        whole = (await proxy.ask(CHAT, ASK, key)).json()["choices"][0]["message"]["content"]
        check(whole.startswith(ANSWER), whole)
        check(streamed(await proxy.ask(CHAT, STREAM, key)) == whole, "a streamed chat")
        message = (await proxy.ask(MESSAGES, ASK, key)).json()
        check(message["content"][0]["text"] == whole and message["usage"]["output_tokens"] > 10, message)
        check(streamed(await proxy.ask(MESSAGES, STREAM, key)) == whole, "a streamed message")
        called = await proxy.ask(CHAT, ASK | {"tools": [TOOL], "tool_choice": "required"}, key)
        check(called.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add", called)


async def open_webui(at: Place) -> None:
    """models, chat, stream, chats of its page with tools, one of which must be called, title, tags, follow-ups"""
    there = {"OPENAI_API_BASE_URL": at.url, "ENABLE_OLLAMA_API": "False", "OFFLINE_MODE": "True"}
    there |= {"HF_HUB_OFFLINE": "1", "DATA_DIR": str(at.folder / "data"), "RAG_EMBEDDING_ENGINE": "openai"}
    # Without torch: the packages of requirements-slim.txt, which is in its wheel.
    there |= {"USE_SLIM_DOCKER": "True", "CHAT_RESPONSE_MAX_TOOL_CALL_ITERATIONS": "1"}
    async with at.listening("serve", WEBUI_AUTH="False", WEBUI_SECRET_KEY="unused", **there) as server:
        key = (await server.ask("/api/v1/auths/signin", {"email": "", "password": ""}, "")).json()["token"]
        models = (await server.ask("/api/models", None, key)).json()["data"]
        check([model["id"] for model in models] == ["bundled"], models)
        chat = "/api/chat/completions"
        whole = (await server.ask(chat, ASK, key)).json()["choices"][0]["message"]["content"]
        check(whole.startswith(ANSWER[:30]), whole)
        check(streamed(await server.ask(chat, STREAM, key)) == whole, "a streamed chat")

        asked = {"id": "asked", "parentId": None, "role": "user", "content": ASKED, "models": ["bundled"]}
        tasks = {"title_generation": True, "tags_generation": True, "follow_up_generation": True}
        page = STREAM | {"session_id": "a page", "parent_id": None, "id": "answer", "user_message": asked}
        answer = await _answered(server, page | {"background_tasks": tasks}, key)
        check(answer.get("error") is None and len(answer["content"]) > 3, answer)
        forced = {"type": "function", "function": {"name": "get_current_timestamp"}}
        # The model is asked twice, before and after the tool has run, and has to call it each time.
        called = await _answered(server, page | {"params": {"custom_params": {"tool_choice": forced}}}, key)
        types = [item["type"] for item in called["output"]]
        check([types.count("function_call"), types.count("function_call_output")] == [2, 1], called)
        check("limit reached" in called["error"]["content"], called)

        said = [*QUESTION, {"role": "assistant", "content": whole}]
        for task in ("title", "tags", "follow_up", "queries"):
            body = {"model": "bundled", "messages": said, "type": "web_search"}
            done = (await server.ask(f"/api/v1/tasks/{task}/completions", body, key)).json()
            check(done["choices"][0]["message"]["role"] == "assistant", done)


async def _answered(server: Server, page: dict[str, Any], key: str) -> dict[str, Any]:
    """The answer to what a page of Open WebUI asks in a new chat."""
    chat = (await server.ask("/api/chat/completions", page, key)).json()["chat_id"]
    async with asyncio.timeout(LIMIT_S):
        while True:
            kept = (await server.ask(f"/api/v1/chats/{chat}", None, key)).json()
            answer: dict[str, Any] = kept["chat"]["history"]["messages"][page["id"]]
            if answer.get("done"):
                return answer
            await asyncio.sleep(0.1)


def streamed(reply: Reply) -> str:
    """Of a stream of chat chunks, or of Anthropic's events."""
    events = [json.loads(line[6:]) for line in reply.body.splitlines() if line.startswith(b"data: {")]
    chunks = [choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ())]
    return "".join(chunks + [event["delta"].get("text", "") for event in events if "delta" in event])


async def lm_eval(at: Place) -> None:
    """choices by their log-probability and a text, as completions with the server's tokenizer; a text as chat"""
    (at.folder / "questions.jsonl").write_text(
        json.dumps({"question": ASKED, "choices": [ANSWER, "Banana"], "answer": 0}) + "\n"
    )
    data = {"test": str(at.folder / "questions.jsonl")}
    task = {"dataset_path": "json", "dataset_kwargs": {"data_files": data}, "test_split": "test"}
    task |= {"doc_to_text": "{{question}}"}
    choose = {"task": "choose", "output_type": "multiple_choice", "metric_list": [{"metric": "acc"}]}
    at.write("choose.yaml", task | choose | {"doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"})
    say = {"task": "say", "output_type": "generate_until", "metric_list": [{"metric": "exact_match"}]}
    # Of one line.
    say |= {"doc_to_target": "{{choices[answer]}}", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 40}}
    at.write("say.yaml", task | say)

    async def run(kind: str, path: str, tasks: str, *more: str) -> str:
        model = f"model=bundled,base_url={at.url}/{path},max_retries=1"
        told = ("--model", kind, "--model_args", model, "--tasks", tasks, "--include_path", str(at.folder))
        return await at.run("run", *told, *more, HF_HUB_OFFLINE="1")

    completed = await run("local-completions", "completions", "choose,say")
    check("remote tokenizer" in completed, "the server's tokenizer")
    check(re.search(r"\|choose *\|.*\|acc *\|.*\| *1\|", completed) is not None, completed[-500:])
    check(re.search(r"\|say *\|.*\|exact_match *\|", completed) is not None, completed[-500:])
    said = await run("local-chat-completions", "chat/completions", "say", "--apply_chat_template")
    check(re.search(r"\|say *\|.*\|exact_match *\|.*\| *1\|", said) is not None, said[-500:])


async def guidellm(at: Place) -> None:
    """4 streamed chats"""
    await at.run(
        "run", "--backend", f"kind=openai_http,target={at.root},model=bundled",
        "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
        "--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=16",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4",
        "--output", f"kind=json,path={at.folder / 'report.json'}", "--disable-console",
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    metrics = at.read("report.json")["benchmarks"][0]["metrics"]
    check(metrics["request_totals"]["successful"] == metrics["request_totals"]["total"] == 4, metrics["request_totals"])


async def aiperf(at: Place) -> None:
    """4 streamed chats, the server's metrics"""
    shown = await at.run(
        "profile", "--model", "bundled", "--url", at.root, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", TOKENIZER, "--request-count", "4", "--concurrency", "2",
        "--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16", "--extra-inputs", "ignore_eos:true",
        "--ui", "simple", "--artifact-dir", str(at.folder / "report"),
        HF_HUB_OFFLINE="",  # set, it takes no folder
    )  # fmt: skip
    report = at.read("report/profile_export_aiperf.json")
    check(report["request_count"]["avg"] == 4 and not report["error_summary"], report["error_summary"])
    check(report["usage_completion_tokens"]["min"] == 16, report["usage_completion_tokens"])
    check("1/1 endpoint(s) reachable" in shown, "the server's metrics")


async def aider(at: Place) -> None:
    """a question, streamed"""
    shown = await at.run(
        "--model", "openai/bundled", "--chat-mode", "ask", "--message", ASKED, "--no-git", "--no-pretty",
        "--no-check-update", "--no-show-model-warnings", "--no-show-release-notes", "--analytics-disable",
        OPENAI_API_BASE=at.url,
    )  # fmt: skip
    check(re.search(r"Tokens: \d+ sent, \d+ received", shown) is not None and "litellm." not in shown, shown[-500:])


async def codex(at: Place) -> None:
    """a question, as responses"""
    provider = f'{{name="engine",base_url="{at.url}",env_key="OPENAI_API_KEY",wire_api="responses"}}'
    told = ("-c", "model=bundled", "-c", "model_provider=engine", "-c", f"model_providers.engine={provider}")
    answer = at.folder / "answer"
    await at.run("exec", "--skip-git-repo-check", "--output-last-message", str(answer), *told, ASKED)
    check(len(answer.read_text().strip()) > 3, "an answer")


async def claude(at: Place) -> None:
    """a question, as messages"""
    there = {"ANTHROPIC_BASE_URL": at.root, "ANTHROPIC_API_KEY": "unused", "ANTHROPIC_DEFAULT_HAIKU_MODEL": "bundled"}
    there |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    shown = await at.run("--model", "bundled", "--output-format", "json", "-p", ASKED, **there)
    result = json.loads(shown.splitlines()[-1])
    check(not result["is_error"] and len(result["result"].strip()) > 3, result)


PROGRAMS: Mapping[str, Callable[[Place], Awaitable[None]]] = {
    "litellm": litellm,
    "open-webui": open_webui,
    "lm_eval": lm_eval,
    "guidellm": guidellm,
    "aiperf": aiperf,
    "aider": aider,
    "codex": codex,
    "claude": claude,
}
"""By the name that ``--program`` gives them."""
AGENTS = frozenset({"codex", "claude", "open-webui"})
"""Their prompts are longer than the bundled model takes: they ask :mod:`tools.clients.long_model`."""
