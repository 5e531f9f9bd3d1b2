"""From a decoded request to a :class:`engine.http.answering.Job`: what chat and completions share."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from aiohttp import web

from engine.contracts.request import SamplingParams
from engine.contracts.router import ApiRequest
from engine.http.answering import Job, now_ms_since, request_id
from engine.http.bodies import Body
from engine.http.state import STATE, TRACE, ServerState
from engine.service.addresses import network_of
from engine.service.chat_template import TemplateFailed
from engine.service.errors import ApiError, bad_request
from engine.service.message_content import text_of
from engine.service.parsing import Turns
from engine.service.protocol import ChatOptions, CompletionOptions
from engine.service.timings import Arrival
from engine.service.tokenizer import TokenizerError, TooManyTokens
from engine.service.trace_context import trace_context
from engine.service.validation import (
    DEFAULT_COMPLETION_TOKENS,
    check_echoed_logprobs,
    check_token_ids,
    output_limit,
    sampling_params,
    stop_strings,
    too_long,
)


def state_of(http: web.Request) -> ServerState:
    return http.app[STATE]


def client_of(http: web.Request, user: str | None = None) -> str:
    """Who sent a request: its address, or the user it names where that is trusted. Clients share the queue and take
    turns."""
    trusted = user and state_of(http).settings.trust_user
    return f"user:{user}" if trusted else f"address:{network_of(http.remote or '')}"


def arrival_of(http: web.Request, received_s: float, parsed_s: float) -> Arrival:
    """Of a request whose prompts were tokenized just now."""
    receive_ms, tokenize_ms = (parsed_s - received_s) * 1e3, now_ms_since(parsed_s)
    trace = trace_context(http.headers.getall("traceparent", []), http.headers.getall("tracestate", []))
    http[TRACE] = trace
    return Arrival(received_s, receive_ms, tokenize_ms, trace)


async def encode_text(
    state: ServerState, client: str, text: str, *, add_special_tokens: bool = True, fits: bool = True
) -> tuple[int, ...]:
    """Raises :class:`ApiError` 400 for text that cannot fit, before tokenizing it if that is certain.

    ``fits=False``: it need not fit into the model's context.
    """
    if fits:
        _refuse_hopeless(state, state.tokenizer.fewest_tokens(text), "prompt")
    try:
        tokens = await state.tokenizer.encode(text, add_special_tokens=add_special_tokens, client=client)
    except TooManyTokens as error:
        raise too_long(f"at least {error.count}", state.max_len, "prompt") from None
    except TokenizerError as error:
        raise _refused(error, "prompt") from None
    return check_token_ids(tokens, state.vocab_size)


async def encode_turns(
    state: ServerState, client: str, turns: Turns, add_generation_prompt: bool, variables: dict[str, Any] | None = None
) -> tuple[int, ...]:
    """``variables``: more names for the template. Raises :class:`ApiError` 400 when the model has no template, or its
    template refuses the conversation."""
    _refuse_hopeless(state, sum(state.tokenizer.fewest_tokens(text_of(turn["content"])) for turn in turns), "messages")
    try:
        tokens = await state.tokenizer.encode_chat(
            turns, add_generation_prompt=add_generation_prompt, variables=variables, client=client
        )
    except TooManyTokens as error:
        raise too_long(f"at least {error.count}", state.max_len, "messages") from None
    except (TemplateFailed, TokenizerError) as error:
        raise _refused(error, "messages") from None
    return check_token_ids(tokens, state.vocab_size, "messages")


def _refused(error: Exception, param: str) -> ApiError:
    return bad_request(f"{str(error)[:1].upper()}{str(error)[1:]}.".replace("..", "."), param)


def _refuse_hopeless(state: ServerState, fewest: int, param: str) -> None:
    """A text far beyond the limit is refused without the work of tokenizing it."""
    if fewest > state.max_len:
        raise too_long(f"at least {fewest}", state.max_len, param)


def make_job(
    state: ServerState,
    request: ChatOptions | CompletionOptions,
    prompts: tuple[tuple[int, ...], ...],
    n: int,
    body: Body,
    client: str,
    arrival: Arrival,
) -> Job:
    """Check lengths and parameters. Raises :class:`ApiError` 400."""
    is_chat = isinstance(request, ChatOptions)
    if request.priority is not None and request.priority < (least := state.settings.least_priority):
        raise bad_request(f"priority must be at least {least} (server.least_priority).", "priority")
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
        echo=isinstance(request, CompletionOptions) and bool(request.echo),
        fields=_fields(request),
    )
    check_echoed_logprobs(api)
    return Job(api, request, body, arrival, client, int(time.time()), state.fingerprint)


def _fields(request: ChatOptions | CompletionOptions) -> dict[str, Any]:
    given = msgspec.structs.asdict(request).items()
    return {name: msgspec.to_builtins(value) for name, value in given if value is not None}


def _sampling(
    state: ServerState, request: ChatOptions | CompletionOptions, prompts: tuple[tuple[int, ...], ...]
) -> SamplingParams:
    asked, param = request.max_tokens, "max_tokens"
    default: int | None = DEFAULT_COMPLETION_TOKENS
    if isinstance(request, ChatOptions):
        default = None
        if request.max_completion_tokens is not None:
            asked, param = request.max_completion_tokens, "max_completion_tokens"
    limit = max(output_limit(asked, len(prompt), state.max_len, default, param) for prompt in prompts)
    return sampling_params(request, limit, state.vocab_size)
