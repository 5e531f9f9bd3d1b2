"""From a decoded request to a :class:`engine.serving.answering.Job`: what chat and completions share."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from aiohttp import web

from engine.contracts.request import SamplingParams
from engine.contracts.router import ApiRequest
from engine.serving.answering import Job, request_id
from engine.serving.chat_template import TemplateFailed
from engine.serving.errors import ApiError, bad_request
from engine.serving.protocol import ChatRequest, CompletionRequest, Message
from engine.serving.state import STATE, ServerState
from engine.serving.timings import Arrival
from engine.serving.tokenizer import TokenizerError
from engine.serving.validation import (
    DEFAULT_COMPLETION_TOKENS,
    check_token_ids,
    output_limit,
    sampling_params,
    stop_strings,
    template_messages,
    too_long,
)


def state_of(http: web.Request) -> ServerState:
    return http.app[STATE]


async def encode_text(state: ServerState, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
    """Raises :class:`ApiError` 400 for text that cannot fit, before tokenizing it."""
    _refuse_hopeless(state, state.tokenizer.fewest_tokens(text), "prompt")
    try:
        tokens = await state.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except TokenizerError as error:
        raise _refused(error, "prompt") from None
    return check_token_ids(tokens, state.vocab_size)


async def encode_messages(
    state: ServerState, messages: list[Message], add_generation_prompt: bool | None
) -> tuple[int, ...]:
    """Raises :class:`ApiError` 400 when the model has no template, or its template refuses the conversation."""
    turns = template_messages(messages)
    _refuse_hopeless(state, sum(state.tokenizer.fewest_tokens(turn["content"]) for turn in turns), "messages")
    try:
        tokens = await state.tokenizer.encode_chat(turns, add_generation_prompt=add_generation_prompt is not False)
    except (TemplateFailed, TokenizerError) as error:
        raise _refused(error, "messages") from None
    return check_token_ids(tokens, state.vocab_size, "messages")


def _refused(error: Exception, param: str) -> ApiError:
    return bad_request(f"{str(error)[:1].upper()}{str(error)[1:]}.".replace("..", "."), param)


def _refuse_hopeless(state: ServerState, fewest: int, param: str) -> None:
    """A text far beyond the limit is refused without the work of tokenizing it."""
    if fewest >= state.max_len:
        raise too_long(f"at least {fewest}", state.max_len, param)


def make_job(
    state: ServerState,
    request: ChatRequest | CompletionRequest,
    prompts: tuple[tuple[int, ...], ...],
    n: int,
    body: bytes,
    arrival: Arrival,
) -> Job:
    """Check lengths and parameters. Raises :class:`ApiError` 400."""
    is_chat = isinstance(request, ChatRequest)
    api = ApiRequest(
        request_id=request_id("chatcmpl" if is_chat else "cmpl"),
        kind="chat" if is_chat else "completion",
        model=state.model,
        prompts=prompts,
        n=n,
        sampling=_sampling(state, request, prompts),
        cache_salt=request.cache_salt or "",
        stop=stop_strings(request),
        stream=bool(request.stream),
        echo=isinstance(request, CompletionRequest) and bool(request.echo),
        fields=_fields(request),
    )
    return Job(api, request, body, arrival, int(time.time()), state.fingerprint)


def _fields(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    given = msgspec.structs.asdict(request).items()
    return {
        name: msgspec.to_builtins(value)
        for name, value in given
        if value is not None and name not in ("prompt", "messages")
    }


def _sampling(
    state: ServerState, request: ChatRequest | CompletionRequest, prompts: tuple[tuple[int, ...], ...]
) -> SamplingParams:
    asked, param = request.max_tokens, "max_tokens"
    default: int | None = DEFAULT_COMPLETION_TOKENS
    if isinstance(request, ChatRequest):
        default = None
        if request.max_completion_tokens is not None:
            asked, param = request.max_completion_tokens, "max_completion_tokens"
    limit = max(output_limit(asked, len(prompt), state.max_len, default, param) for prompt in prompts)
    return sampling_params(request, limit, state.vocab_size)
