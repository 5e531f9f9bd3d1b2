"""Answers that one engine has begun and others go on with, whenever they are drained: they are those of one engine."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from engine.assembly.assemble import assemble
from engine.contracts.constraint import Grammar
from engine.contracts.request import ReasoningTokens
from engine.contracts.router import Attempts
from engine.service.bus import EventBus
from engine.service.dispatch import Dispatcher
from engine.service.engines import EngineHandle
from engine.service.generation import Usage
from engine.service.job import Job, Prompts
from engine.service.load import Load
from engine.service.placing import Placing
from engine.service.prepare import Shape, make_job
from engine.service.protocol import CompletionOptions
from engine.service.start_check import load_tokenizer
from engine.service.timings import Arrival
from engine.startup.inprocess import InprocessEngineClient
from engine.startup.segments import ServerMemory
from tests.service.fakes import DirectRouter

OVERRIDES = ("device=cpu", "threads=1", "model.max_len=256", "exporter=[]", "fleet.replicas=2")
STORES = ("kv_store=[host]", "kv_store.host.max_bytes=33554432")
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 30}}, "required": ["name"]}'
GREEDY = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
SEEDED = {"temperature": 1.0, "max_tokens": 40, "seed": 7}
ASKED: Sequence[dict[str, Any]] = (
    {**GREEDY},
    {**GREEDY, "logprobs": 2, "echo": True},
    {**GREEDY, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    {**GREEDY, "grammar": Grammar("json_schema", SCHEMA), "ignore_eos": False},
    {**GREEDY, "thinks": 9},
    {**SEEDED, "n": 3, "min_tokens": 30},
    {**SEEDED, "stop": ["e", ". "], "min_tokens": 8},
    {**SEEDED, "logprobs": 1, "top_p": 0.9, "frequency_penalty": 0.5},
)


@dataclass(frozen=True)
class Answer:
    choices: list[Any]
    """Text, token ids, finish reason and prompt logprobs of each."""
    logprobs: list[list[float]]
    usage: Usage
    hand_overs: int


class Pair:
    """Two engines of one plan in threads."""

    def __init__(self, *overrides: str) -> None:
        plan = assemble([*OVERRIDES, *overrides])
        memory, tokenizer = ServerMemory(plan), load_tokenizer(plan)
        clients = [InprocessEngineClient(plan, memory.of(at)) for at in range(2)]
        self.engines = {name: EngineHandle(name, plan, each, tokenizer) for name, each in zip("ab", clients)}
        self.router = DirectRouter()
        self.router.decision = Attempts(("a", "b"), "because")
        self.dispatcher = Dispatcher(Placing(self.router), self.engines, EventBus([]))

    def job(self, salt: str, grammar: Grammar | None = None, thinks: int = 0, **asked: Any) -> Job:
        engine = self.engines["a"]
        ids = engine.tokenizer.encode_now("Write a function that parses a file of JSON lines. " * 3)
        options, arrival = CompletionOptions(cache_salt=salt, **asked), Arrival(time.monotonic(), 0.0, 0.0)
        texts = ("",) if options.echo else ()
        job = make_job(engine, options, Prompts((ids,), texts), "someone", arrival, Shape(grammar))
        if thinks:
            sampling = msgspec.structs.replace(job.api.sampling, reasoning=ReasoningTokens(closes=5, budget=thinks))
            job = replace(job, api=replace(job.api, sampling=sampling))
        return job

    def drain(self, name: str) -> None:
        """The other one takes requests."""
        for other in self.engines.values():
            other.draining = False
        self.engines[name].drain()


@asynccontextmanager
async def pair(*overrides: str) -> AsyncIterator[Pair]:
    engines = Pair(*overrides)
    await asyncio.gather(*[engine.supervisor.start() for engine in engines.engines.values()])
    try:
        yield engines
    finally:
        await asyncio.gather(*[engine.client.close() for engine in engines.engines.values()])


async def answer(engines: Pair, salt: str, asked: dict[str, Any], drains: random.Random | None = None) -> Answer:
    """``drains``: now and then one engine or the other is drained."""
    job = engines.job(salt, **asked)
    route = engines.dispatcher.place(job.api)
    assert isinstance(route, Attempts)
    found: list[Any] = [["", [], None, ()] for _ in range(job.num_sequences)]
    logprobs: list[Any] = [[] for _ in found]
    async with engines.dispatcher.generate(job, route) as generation:
        async for delta in generation:
            choice = found[delta.index]
            choice[0] += delta.text
            choice[1] += delta.token_ids
            choice[2] = delta.finish_reason
            choice[3] += tuple([each and each.token for each in delta.prompt_logprobs])
            logprobs[delta.index] += [each.logprobs.logprob for each in delta.tokens if each.logprobs is not None]
            if drains is not None and drains.random() < 0.05:
                engines.drain(drains.choice("ab"))
        reason = generation.account().public()["route"]["reason"]
        return Answer(found, logprobs, generation.usage(), reason.count("went on at"))


def settled(engines: Pair) -> bool:
    stats = [engine.client.stats for engine in engines.engines.values()]
    return all(each.running == each.waiting == each.blocks_leased == each.rows_used == 0 for each in stats)


async def equal_answers(rounds: int, *overrides: str) -> None:
    async with pair(*overrides) as engines:
        assert all(engine.identity for engine in engines.engines.values())
        expected = [await answer(engines, f"alone {at}", asked) for at, asked in enumerate(ASKED)]
        hand_overs = 0
        for seed in range(rounds):
            drains = random.Random(seed)
            salts = [f"{seed} {at}" for at in range(len(ASKED))]
            crowd = [answer(engines, salt, asked, drains) for salt, asked in zip(salts, ASKED)]
            for asked, its, found in zip(ASKED, expected, await asyncio.gather(*crowd)):
                assert found.choices == its.choices, (seed, asked)
                for ours, theirs in zip(found.logprobs, its.logprobs, strict=True):
                    assert ours == pytest.approx(theirs, abs=1e-4), (seed, asked)
                assert found.usage == its.usage, (seed, asked)
                hand_overs += found.hand_overs
            assert [engine.load for engine in engines.engines.values()] == [Load(), Load()]
            assert not any(engine.sendings for engine in engines.engines.values())
        assert hand_overs > 10 * rounds
        async with asyncio.timeout(10):
            while not settled(engines):
                await asyncio.sleep(0.01)
        stores = [store for engine in engines.engines.values() for store in engine.client.stats.stores]
        assert not stores or sum(store.loaded_tokens for store in stores) > 0


@pytest.mark.parametrize("overrides", [(), (*STORES, "drafter=draft_model")])
def test_answers_that_move_between_engines_are_those_of_one(overrides: tuple[str, ...]) -> None:
    asyncio.run(asyncio.wait_for(equal_answers(2, *overrides), 60))
