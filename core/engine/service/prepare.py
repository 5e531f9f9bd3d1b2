"""From a parsed request to a :class:`~engine.service.job.Job`: chat template, tokenizer, limits, parameters."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.contracts.constraint import Grammar
from engine.contracts.request import Retained, SamplingParams
from engine.contracts.router import ApiRequest
from engine.service.cache_words import going_on_otherwise, whole_prompt_s
from engine.service.chat_template import TemplateFailed
from engine.service.engines import EngineHandle
from engine.service.errors import ApiError, bad_request
from engine.service.grammars import grammar_of
from engine.service.job import Job, Prompts
from engine.service.keys import Caller, priority_for, salt_for
from engine.service.parsing import Packed, ParsedCompletion, ParsedTurns, unpack
from engine.service.prefix_misses import common
from engine.service.promises import Promise, promise
from engine.service.protocol import GenerationRequest
from engine.service.reasoning import TAIL_TOKENS, ReasoningUse, reasoning_tokens, reasoning_use
from engine.service.timings import Arrival
from engine.service.tokenizer import TokenizerError, TooManyTokens
from engine.service.tools import ToolUse, answer_grammar, tool_grammar, tool_use
from engine.service.turns import Conversation, question_of
from engine.service.validation import (
    check_echoed_logprobs,
    check_token_ids,
    output_limit,
    sampling_params,
    stop_strings,
    too_long,
)


async def chat_prompts(engine: EngineHandle, client: str, chat: ParsedTurns) -> Prompts:
    """Raises :class:`ApiError` like :func:`encode_conversation`."""
    tokens = await encode_conversation(engine, client, chat.conversation)
    retain = await _retain(engine, client, chat.conversation, tokens)
    return Prompts((tokens,), question=question_of(chat.conversation), retain=retain)


async def _retain(
    engine: EngineHandle, client: str, conversation: Conversation, tokens: tuple[int, ...]
) -> tuple[Retained, ...]:
    """Where the breakpoints of a conversation are in its prompt. One is passed over if the template does not take the
    conversation with another continuation."""
    found: list[Retained] = []
    for end in conversation.breakpoints:
        try:
            other = await engine.tokenizer.encode_chat(going_on_otherwise(conversation, end), client=client)
        except (TemplateFailed, TokenizerError, TooManyTokens):
            continue
        found.append((common(tokens, other), end.seconds))
    return tuple(found)


async def completion_prompts(engine: EngineHandle, client: str, completion: ParsedCompletion) -> Prompts:
    """Raises :class:`ApiError` like :func:`encode_text`."""
    prompts: Sequence[str | Packed] = completion.prompts
    tokens = tuple([await _tokens(engine, client, prompt) for prompt in prompts])
    seconds = whole_prompt_s(completion.options)
    retain = ((max(map(len, tokens)), seconds),) if seconds else ()
    if not completion.options.echo:
        return Prompts(tokens, retain=retain)
    texts = [await _text(engine, client, prompt, ids) for prompt, ids in zip(prompts, tokens)]
    return Prompts(tokens, tuple(texts), retain=retain)


async def _tokens(engine: EngineHandle, client: str, prompt: str | Packed) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return await encode_text(engine, client, prompt)
    await asyncio.sleep(0)  # others get their turn between prompts that may be long
    return unpack(prompt)


async def _text(engine: EngineHandle, client: str, prompt: str | Packed, tokens: Sequence[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return await engine.tokenizer.decode(tokens, skip_special_tokens=True, client=client)


async def encode_text(
    engine: EngineHandle, client: str, text: str, *, add_special_tokens: bool = True, fits: bool = True
) -> tuple[int, ...]:
    """Raises :class:`ApiError` ``invalid`` for text that cannot fit, before tokenizing it if that is certain.

    ``fits=False``: it need not fit into the model's context.
    """
    if fits:
        _refuse_hopeless(engine, engine.tokenizer.fewest_tokens(text), "prompt")
    try:
        tokens = await engine.tokenizer.encode(text, add_special_tokens=add_special_tokens, client=client)
    except TooManyTokens as error:
        raise too_long(f"at least {error.count}", engine.max_len, "prompt") from None
    except TokenizerError as error:
        raise _refused(error, "prompt") from None
    return check_token_ids(tokens, engine.vocab_size)


async def encode_conversation(engine: EngineHandle, client: str, conversation: Conversation) -> tuple[int, ...]:
    """Raises :class:`ApiError` ``invalid`` when the model has no template, or its template refuses the
    conversation."""
    fewest = sum(engine.tokenizer.fewest_tokens(turn.text) for turn in conversation.turns)
    _refuse_hopeless(engine, fewest, "messages")
    try:
        tokens = await engine.tokenizer.encode_chat(conversation, client=client)
    except TooManyTokens as error:
        raise too_long(f"at least {error.count}", engine.max_len, "messages") from None
    except (TemplateFailed, TokenizerError) as error:
        raise _refused(error, "messages") from None
    return check_token_ids(tokens, engine.vocab_size, "messages")


def _refused(error: Exception, param: str) -> ApiError:
    return bad_request(f"{str(error)[:1].upper()}{str(error)[1:]}.".replace("..", "."), param)


def _refuse_hopeless(engine: EngineHandle, fewest: int, param: str) -> None:
    """A text far beyond the limit is refused without the work of tokenizing it."""
    if fewest > engine.max_len:
        raise too_long(f"at least {fewest}", engine.max_len, param)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the output must look like, and may call."""

    grammar: Grammar | None = None
    tools: ToolUse | None = None


async def checked_shape(engine: EngineHandle, options: GenerationRequest) -> Shape:
    """Raises :class:`ApiError` as :meth:`GrammarChecks.check`, and ``invalid`` for tools that cannot be called."""
    param, asked = grammar_of(options) or ("tools", None)
    tools = tool_use(options, engine.tokenizer)
    if tools is None:
        grammar = answer_grammar(options, engine.tokenizer, asked)
    else:
        grammar = tool_grammar(options, tools, engine.tokenizer.special_ids, asked)
    if grammar is not None:
        await engine.grammars.check(grammar, param)
    return Shape(grammar, tools)


def make_job(
    engine: EngineHandle,
    options: GenerationRequest,
    prompts: Prompts,
    client: str,
    arrival: Arrival,
    shape: Shape = Shape(),
    caller: Caller | None = None,
    promised: Promise | None = None,
) -> Job:
    """Check lengths and parameters. ``shape``: as :func:`checked_shape` found it. ``caller``: whose key it has, where
    keys are told apart. ``promised``: the class that it asks for, if it asks for one. Raises :class:`ApiError`
    ``invalid``."""
    promised = promised or promise(engine.plan.settings.slo, caller, None)
    priority = priority_for(caller, options.priority, engine.plan.settings.server.least_priority)
    options = msgspec.structs.replace(options, priority=priority)
    use = reasoning_use(options, engine.tokenizer, lambda: engine.decode(prompts.tokens[0][-TAIL_TOKENS:]))
    api = ApiRequest(
        request_id=f"{options.id_prefix}{uuid.uuid4().hex}",
        kind=options.kind,
        model=engine.model,
        prompts=prompts.tokens,
        n=options.num_choices(),
        sampling=_sampling(engine, options, prompts.tokens, shape.grammar, use),
        cache_salt=salt_for(caller, options.cache_salt),
        stop=stop_strings(options),
        stream=bool(options.stream),
        echo=options.echoes,
        fields=_fields(options),
        fingerprint=engine.fingerprint,
        question=prompts.question,
    )
    check_echoed_logprobs(api)
    now, fingerprint = int(time.time()), engine.fingerprint
    return Job(
        api, options, prompts.texts, arrival, client, now, fingerprint, shape.tools, use, promised, prompts.retain
    )


def _fields(options: GenerationRequest) -> dict[str, Any]:
    given = msgspec.structs.asdict(options).items()
    return {name: msgspec.to_builtins(value) for name, value in given if value is not None}


def _sampling(
    engine: EngineHandle,
    options: GenerationRequest,
    prompts: tuple[tuple[int, ...], ...],
    grammar: Grammar | None,
    use: ReasoningUse | None,
) -> SamplingParams:
    asked, param = options.asked_tokens()
    most = engine.max_len
    if options.fits_output and asked is not None:
        asked = min(asked, max(most - min(map(len, prompts)), 1))
    limit = max(output_limit(asked, len(prompt), most, options.default_tokens, param) for prompt in prompts)
    reasoning = reasoning_tokens(options, use, engine.tokenizer, grammar, engine.vocab_size)
    return sampling_params(options, limit, engine.vocab_size, grammar, reasoning)
