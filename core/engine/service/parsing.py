"""From the bytes of a request to what the server works on, within its limits.

Pure functions of the bytes: large bodies are parsed in a process of their own (:mod:`engine.service.body_parser`), so
everything that comes back can be sent through a pipe and taken in quickly.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from engine.service.cache_words import breakpoints_of
from engine.service.chat_request import settle_tools
from engine.service.errors import ApiError, bad_request
from engine.service.messages_request import CountRequest, MessagesOptions, MessagesRequest, messages_chat
from engine.service.ollama_request import (
    DEFAULT_TAG,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    ollama_chat,
    ollama_generate,
)
from engine.service.protocol import (
    ChatOptions,
    ChatRequest,
    CompletionOptions,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
    decode,
)
from engine.service.responses_request import (
    ResponsesOptions,
    ResponsesRequest,
    input_items,
    references_of,
    responses_chat,
)
from engine.service.turns import Conversation
from engine.service.validation import (
    check_bias_size,
    check_token_ids,
    split_prompts,
    template_variables,
    too_long,
    tools_of,
    turns_of,
)

BEYOND_64_BITS = "The request has an integer beyond 64 bits."
LARGE_NUMBER = re.compile(rb"[0-9]{19}")
Packed = bytes
"""Token ids as int32 in this machine's byte order."""


class Limits(msgspec.Struct, frozen=True):
    """What a request may ask of this server."""

    model: str
    max_n: int
    max_len: int
    vocab_size: int
    most_tokens: int
    """Most tokens in one call of ``/tokenize`` or ``/detokenize``."""
    stores: bool = False
    """Responses are stored."""


class ParsedTurns(msgspec.Struct, frozen=True):
    """What is a chat, whatever API asks for it."""

    conversation: Conversation

    @property
    def num_prompts(self) -> int:
        return 1


class ParsedChat(ParsedTurns, frozen=True, tag="chat"):
    options: ChatOptions


class ParsedResponses(ParsedTurns, frozen=True, tag="responses"):
    """Of the new input alone: it may go on from a stored response, and refer to items of stored ones."""

    options: ResponsesOptions
    items: bytes = b""
    """The JSON of the items of the input, with commas between, where the server needs it."""
    references: tuple[tuple[int, str], ...] = ()
    """The items that it refers to: where among :attr:`items`, and their ids."""


class ParsedMessages(ParsedTurns, frozen=True, tag="messages"):
    options: MessagesOptions


class ParsedOllamaChat(ParsedTurns, frozen=True, tag="ollama_chat"):
    options: OllamaOptions


class ParsedOllamaGenerate(ParsedTurns, frozen=True, tag="ollama_generate"):
    options: OllamaOptions


class ParsedCompletion(msgspec.Struct, frozen=True, tag="completion"):
    """``texts`` or ``ids``, one for each prompt."""

    options: CompletionOptions
    texts: tuple[str, ...]
    ids: tuple[Packed, ...]

    @property
    def prompts(self) -> tuple[str, ...] | tuple[Packed, ...]:
        return self.texts or self.ids

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)


class ParsedTokenize(msgspec.Struct, frozen=True, tag="tokenize"):
    """Either ``text`` or ``conversation``."""

    text: str | None
    conversation: Conversation | None
    add_special_tokens: bool


class ParsedCount(msgspec.Struct, frozen=True, tag="count"):
    conversation: Conversation


class ParsedDetokenize(msgspec.Struct, frozen=True, tag="detokenize"):
    tokens: Packed


Parsed = (
    ParsedChat
    | ParsedResponses
    | ParsedMessages
    | ParsedOllamaChat
    | ParsedOllamaGenerate
    | ParsedCompletion
    | ParsedTokenize
    | ParsedCount
    | ParsedDetokenize
)
P = TypeVar("P", bound=Parsed)
S = TypeVar("S", ChatOptions, CompletionOptions)


def parse(kind: type[P], body: bytes, limits: Limits) -> P:
    """Raises :class:`ApiError` ``invalid``, or ``not_found`` for another model."""
    try:
        parsed: P = _PARSERS[kind](body, limits)
    except RecursionError:
        raise bad_request("The request is nested too deeply.", code="invalid_value") from None
    except OverflowError:
        raise bad_request(BEYOND_64_BITS, code="invalid_value") from None
    if LARGE_NUMBER.search(body) and _has_large_number(body):
        raise bad_request(BEYOND_64_BITS, code="invalid_value")
    return parsed


def _has_large_number(body: bytes) -> bool:
    """Whether there is one that no encoder here takes, outside of strings. What is no JSON is refused elsewhere."""
    try:
        left: list[Any] = [msgspec.json.decode(body)]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    while left:
        value = left.pop()
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            return True
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return False


def parse_messages(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> Conversation:
    """A conversation of Python's own values, as the body of a request would bring it. ``variables``: its
    ``chat_template_kwargs``. Raises :class:`ApiError` as :func:`parse`."""
    return parse_chat(messages, chat_template_kwargs=variables).conversation


def parse_chat(messages: Sequence[Mapping[str, Any]], **fields: Any) -> ParsedChat:
    """A chat of Python's own values, as the body of a request would bring it with these ``fields``. Raises
    :class:`ApiError` as :func:`parse`."""
    try:
        body = msgspec.json.encode({"messages": messages} | fields)
    except (TypeError, UnicodeEncodeError, RecursionError) as error:
        raise bad_request(f"The conversation cannot be written as JSON: {error}.", "messages") from None
    request = decode(body, ChatRequest)
    settle_tools(request)
    return ParsedChat(_conversation(request, request.messages), _options(request, ChatOptions))


def unpack(tokens: Packed) -> tuple[int, ...]:
    return tuple(array("i", tokens))


def check_model(name: str | None, served: str) -> None:
    """Raises :class:`ApiError` ``not_found`` unless ``name`` is the served model (or left out)."""
    if name is not None and name != served:
        raise ApiError(
            "not_found",
            f"The model {name[:128]!r} does not exist here; this server has {served!r}.",
            param="model",
            code="model_not_found",
        )


def _chat(body: bytes, limits: Limits) -> ParsedChat:
    request = decode(body, ChatRequest)
    settle_tools(request)
    check_model(request.model, limits.model)
    check_fan_out(1, request.num_choices(), limits)
    _check_turns(request.messages, limits)
    return ParsedChat(_conversation(request, request.messages), _options(request, ChatOptions))


def _responses(body: bytes, limits: Limits) -> ParsedResponses:
    request = decode(body, ResponsesRequest)
    check_model(request.model, limits.model)
    options, messages = responses_chat(request, limits.stores)
    _check_turns(messages, limits)
    references = references_of(request)
    needs_items = options.store or options.previous_response_id is not None or bool(references)
    items = input_items(body) if needs_items else b""
    return ParsedResponses(_conversation(options, messages), options, items, references)


def _messages(body: bytes, limits: Limits) -> ParsedMessages:
    options, conversation = _messages_chat(decode(body, MessagesRequest), limits)
    return ParsedMessages(conversation, options)


def _ollama_chat(body: bytes, limits: Limits) -> ParsedOllamaChat:
    options, messages = ollama_chat(decode(body, OllamaChatRequest))
    return ParsedOllamaChat(_ollama(options, messages, limits), options)


def _ollama_generate(body: bytes, limits: Limits) -> ParsedOllamaGenerate:
    options, messages = ollama_generate(decode(body, OllamaGenerateRequest))
    return ParsedOllamaGenerate(_ollama(options, messages, limits), options)


def _ollama(options: OllamaOptions, messages: list[Message], limits: Limits) -> Conversation:
    check_model(options.model and options.model.removesuffix(DEFAULT_TAG), limits.model)
    _check_turns(messages, limits)
    return _conversation(options, messages)


def _count(body: bytes, limits: Limits) -> ParsedCount:
    return ParsedCount(_messages_chat(decode(body, CountRequest), limits)[1])


def _messages_chat(request: CountRequest, limits: Limits) -> tuple[MessagesOptions, Conversation]:
    check_model(request.model, limits.model)
    options, messages = messages_chat(request)
    _check_turns(messages, limits)
    return options, _conversation(options, messages)


def _completion(body: bytes, limits: Limits) -> ParsedCompletion:
    request = decode(body, CompletionRequest)
    check_model(request.model, limits.model)
    n = request.num_choices()
    if isinstance(request.prompt, list) and request.prompt and not isinstance(request.prompt[0], int):
        check_fan_out(len(request.prompt), n, limits)  # before anything is done for each of them
    prompts = split_prompts(request.prompt)
    check_fan_out(len(prompts), n, limits)
    texts = tuple([prompt for prompt in prompts if isinstance(prompt, str)])
    ids = tuple([_packed(prompt, limits) for prompt in prompts if not isinstance(prompt, str)])
    return ParsedCompletion(_options(request, CompletionOptions), texts, ids)


def _tokenize(body: bytes, limits: Limits) -> ParsedTokenize:
    request = decode(body, TokenizeRequest)
    check_model(request.model, limits.model)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("Expected either prompt or messages.", "prompt")
    conversation = None
    if request.messages is not None:
        _check_turns(request.messages, limits)
        conversation = _conversation(request, request.messages)
    return ParsedTokenize(request.prompt, conversation, request.add_special_tokens is not False)


def _detokenize(body: bytes, limits: Limits) -> ParsedDetokenize:
    request = decode(body, DetokenizeRequest)
    check_model(request.model, limits.model)
    if len(request.tokens) > limits.most_tokens:
        raise bad_request(f"tokens has {len(request.tokens)} ids; at most {limits.most_tokens} at a time.", "tokens")
    return ParsedDetokenize(array("i", check_token_ids(request.tokens, limits.vocab_size, "tokens")).tobytes())


_PARSERS: dict[type[Any], Any] = {
    ParsedChat: _chat,
    ParsedResponses: _responses,
    ParsedMessages: _messages,
    ParsedCount: _count,
    ParsedOllamaChat: _ollama_chat,
    ParsedOllamaGenerate: _ollama_generate,
    ParsedCompletion: _completion,
    ParsedTokenize: _tokenize,
    ParsedDetokenize: _detokenize,
}


def check_fan_out(num_prompts: int, n: int, limits: Limits) -> None:
    """Raises :class:`ApiError` ``invalid`` for more sequences than a request may have."""
    if num_prompts * n > limits.max_n:
        raise bad_request(
            f"{num_prompts} prompts x n={n} are {num_prompts * n} sequences; at most {limits.max_n} per request "
            "(server.max_n).",
            "n" if n > 1 else "prompt",
        )


def _check_turns(messages: list[Message], limits: Limits) -> None:
    """Refuse more turns than fit: each takes at least a token. Raises :class:`ApiError` ``invalid``."""
    if len(messages) > limits.max_len:
        raise too_long(f"at least {len(messages)}", limits.max_len, "messages")


def _conversation(request: ChatOptions | TokenizeRequest, messages: list[Message]) -> Conversation:
    tools = tools_of(request)
    turns, goes_on = turns_of(messages), request.add_generation_prompt is not False
    breakpoints = breakpoints_of(request, messages) if isinstance(request, ChatOptions) else ()
    return Conversation(turns, goes_on, template_variables(request), tools or None, breakpoints=breakpoints)


def _packed(prompt: tuple[int, ...], limits: Limits) -> Packed:
    if len(prompt) > limits.max_len:
        raise too_long(str(len(prompt)), limits.max_len, "prompt")
    return array("i", check_token_ids(prompt, limits.vocab_size)).tobytes()


def _options(request: S, kind: type[S]) -> S:
    """The request without its prompt, which may be long and is not needed once it has been parsed."""
    check_bias_size(request.logit_bias)
    return kind(**{name: getattr(request, name) for name in kind.__struct_fields__})
