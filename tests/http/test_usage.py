"""Usage is what an independent count with the tokenizers library finds, by a real engine on the bundled model."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jinja2
import pytest
import structlog
import tokenizers

from engine.assembly.assemble import assemble
from engine.contracts.request import TokensOut
from engine.http.server import Server
from engine.service.tokenizer import Tokenizer
from engine.startup.inprocess import InprocessEngineClient

from ..service.fakes import DirectRouter, MemoryExporter
from .fakes import Running, events_of

BLOCK = 16
WORDS = ("json", "dumps", "Counter", "def", "class", "return", "the", "of", "é", "😀", "append(", "``obj``", "<|end|>")
OVERRIDES = ["+preset=latency", "drafter=ngram", "device=cpu", "threads=1", "exporter=[]", "server.port=0"]


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Running, dict[str, list[int]]]]:
    """A server over an engine in this process, and the tokens that come out of the engine by sequence."""
    plan = assemble([*OVERRIDES, f"kv_allocator.block_size={BLOCK}"])
    client, said = InprocessEngineClient(plan), defaultdict[str, list[int]](list)
    take = client._deliver_output

    def watched(output: TokensOut) -> None:
        said[output.request_id] += output.tokens
        take(output)

    client._deliver_output = watched  # type: ignore[method-assign]
    router: Any = DirectRouter()
    server = Server(
        plan, {"default": client}, router, [], Tokenizer.from_directory(plan.model.path), say=lambda line: None
    )
    await server.listen()
    await server.state.engine.supervisor.start()
    try:
        yield Running(server, client, router, MemoryExporter()), said  # type: ignore[arg-type]
    finally:
        await server.close()


class Counter:
    """Counts with the files of the model alone."""

    def __init__(self, folder: Path) -> None:
        self.backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.config = json.loads((folder / "tokenizer_config.json").read_text())
        self.template = jinja2.Environment().from_string(self.config["chat_template"])

    def prompts(self, body: dict[str, Any]) -> list[int]:
        """The number of tokens of each prompt."""
        if "messages" in body:
            text = self.template.render(
                messages=body["messages"], add_generation_prompt=True, bos_token=self.config["bos_token"]
            )
            return [len(self.backend.encode(text, add_special_tokens=False))]
        prompt = body["prompt"]
        prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
        return [len(self.backend.encode(p).ids if isinstance(p, str) else p) for p in prompts]

    def completion(self, tokens: Sequence[int], stop: Sequence[str]) -> int:
        """Tokens up to the one that completes a stop string."""
        for count in range(1, len(tokens) + 1):
            text = self.backend.decode(tokens[:count], skip_special_tokens=True)
            if any(one in text for one in stop):
                return count
        return len(tokens)


def random_body(dice: random.Random) -> dict[str, Any]:
    def text(most: int) -> str:
        return " ".join(dice.choices(WORDS, k=dice.randint(1, most)))

    shared = "def main(argv):\n    return json.dumps(argv)\n" * 4
    body: dict[str, Any] = {
        "model": "bundled",
        "n": dice.choice((1, 1, 2, 3)),
        "max_tokens": dice.randint(1, 12),
        "seed": dice.randint(0, 9),
        "temperature": dice.choice((0, 1, 1.5)),
        "stop": dice.choice((None, [" "], ["e", "def"], ["\n", "``"])),
        "ignore_eos": dice.random() < 0.3,
    }
    if dice.random() < 0.4:
        # A message that spells a special token is text; here the template alone is counted, so none does.
        content = text(20).replace("<|end|>", "end")
        return body | {"messages": [{"role": "user", "content": shared * dice.randint(0, 2) + content}]}
    ids = [dice.randrange(300) for _ in range(dice.randint(1, 40))]
    prompts: list[Any] = [text(30), shared + text(3), [text(5), shared + text(5)], ids, [ids, ids[:1]]]
    return body | {"prompt": dice.choice(prompts)}


async def ask(server: Running, body: dict[str, Any], stream: bool) -> tuple[str, dict[str, int]]:
    """The id of an answer, and its usage."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if not stream:
        status, _, data = await server.post(path, body)
        assert status == 200, data
        answer = json.loads(data)
    else:
        _, _, data = await server.post(path, body | {"stream": True, "stream_options": {"include_usage": True}})
        answer = events_of(data)[-1]
    return answer["id"], answer["usage"]


@pytest.mark.parametrize("count", [80, pytest.param(1000, marks=pytest.mark.slow)])
def test_usage_is_what_the_tokenizer_counts(count: int) -> None:
    dice = random.Random(count)
    bodies = [random_body(dice) for _ in range(count)]

    async def scenario() -> None:
        async with serving() as (server, said):
            counter, together = Counter(Path(server.server.state.engine.plan.model.path)), asyncio.Semaphore(12)
            cached = stopped = 0

            async def one(body: dict[str, Any]) -> None:
                nonlocal cached, stopped
                async with together:
                    name, usage = await ask(server, body, dice.random() < 0.5)
                prompts, n, stop = counter.prompts(body), body["n"], body["stop"] or ()
                outputs = [said[f"{name}-{i}"] for i in range(n * len(prompts))]
                lengths = [counter.completion(tokens, stop) for tokens in outputs]
                assert usage["prompt_tokens"] == sum(prompts)
                assert usage["completion_tokens"] == sum(lengths)
                assert usage["total_tokens"] == sum(prompts) + sum(lengths)
                assert all(0 < length <= body["max_tokens"] for length in lengths)
                hits = usage["prompt_tokens_details"]["cached_tokens"]
                assert 0 <= hits <= sum(length - 1 for length in prompts)
                cached += hits > 0
                stopped += lengths != [len(tokens) for tokens in outputs]

            await asyncio.gather(*map(one, bodies))
            assert cached > count / 10 and stopped, "the mix has what is to be counted"

    with structlog.testing.capture_logs():
        asyncio.run(scenario())
