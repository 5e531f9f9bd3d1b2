"""The body of ``/v1/responses``, and the chat that it asks for.

A request that goes on from a stored response is given the whole conversation before it is translated for good: see
:func:`with_input` and :mod:`engine.service.response_store`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.service.chat_request import check_allowed
from engine.service.errors import bad_request
from engine.service.protocol import (
    CacheBreakpoint,
    ChatOptions,
    ChosenFunction,
    CommonOptions,
    ContentPart,
    Effort,
    JsonSchemaFormat,
    Message,
    MessageFunction,
    MessageToolCall,
    OutputLimit,
    ResponseFormat,
    Schema,
    Stops,
    TemplateVariables,
    Tool,
    ToolChoice,
)
from engine.service.translating import common, function_tool, required, system_first

TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
"""Kinds of parts that are text."""
TOLERATED = re.compile(r"\w+_call|\w+_call_output|mcp_\w+|tool_search_output|compaction")
"""Kinds of items that say what another service did by itself: the model here is not told."""
REFERENCE = "item_reference"
"""The kind of an item that stands for one of a stored response, by its id."""


class Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class Item(msgspec.Struct):
    """A message, a call, what a call came to, or reasoning."""

    type: str = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None


class ResponsesTool(msgspec.Struct):
    """A function that the model may call, or a tool that other services run."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesChoice(msgspec.Struct):
    """The function that must be called, or which tools are allowed."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] = []


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: Schema | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None
    """Without effect."""


class ReasoningOptions(msgspec.Struct):
    effort: Effort | None = None
    summary: str | None = None
    """Without effect."""


class ResponsesRequest(CommonOptions, kw_only=True):
    ignored = frozenset({"client_metadata", "max_tool_calls", "context_management"})
    verbatim = frozenset({"tools", "text"})

    input: str | list[Item] = ""
    instructions: str | None = None
    max_output_tokens: OutputLimit | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    """``message.output_text.logprobs`` is what this server has; the rest is without effect."""
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    """False: nothing of the request and its response is stored. ``None``: they are, if the server stores any."""
    truncation: Literal["auto", "disabled"] | None = None
    """Without effect: nothing of a conversation is left out."""
    stream_options: dict[str, Any] | None = None
    """Without effect."""
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    stop: Stops | None = None
    """What the API does not have, and this server does; so are the next ones."""
    chat_template_kwargs: TemplateVariables | None = None
    enable_thinking: bool | None = None


class ResponsesOptions(ChatOptions, kw_only=True):
    """The chat that a request asks for."""

    kind = "responses"
    id_prefix = "resp_"
    fits_output = True

    store: bool = False
    """The answer is stored."""
    previous_response_id: str | None = None
    """The response that the conversation goes on from."""
    echoed: dict[str, Any] = msgspec.field(default_factory=dict)
    """What the answer repeats of the request."""

    @property
    def format_field(self) -> str:
        return "text.format"

    @property
    def schema_field(self) -> str:
        return "text.format.schema"


def responses_chat(request: ResponsesRequest, stores: bool) -> tuple[ResponsesOptions, list[Message]]:
    """``stores``: the server stores responses. Raises :class:`ApiError` ``invalid`` for what needs a conversation that
    it has not."""
    for name in ("conversation", "prompt", "background"):
        if getattr(request, name):
            raise bad_request(f"{name!r} is not supported; leave it out.", name, "unsupported_parameter")
    references = [(f"input[{i}]", name) for i, name in references_of(request)[:1]]
    for at, stored in (("previous_response_id", request.previous_response_id), *references):
        if stored and not stores:
            raise bad_request(
                f"{at!r} needs stored responses, and this server stores none (server.store_bytes=0). Send the whole "
                "conversation as 'input'.",
                at,
                "unsupported_parameter",
            )
    if request.max_output_tokens == 0:
        raise bad_request("'max_output_tokens' is 0, expected at least 1.", "max_output_tokens", "invalid_value")
    tools, choice = _tools(request)
    wants_logprobs = "message.output_text.logprobs" in (request.include or ())
    options = ResponsesOptions(
        **common(request),
        max_completion_tokens=request.max_output_tokens,
        stop=request.stop,
        chat_template_kwargs=request.chat_template_kwargs,
        enable_thinking=request.enable_thinking,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request.text.format if request.text else None),
        logprobs=wants_logprobs or None,
        top_logprobs=request.top_logprobs if wants_logprobs else None,
        store=stores and request.store is not False,
        previous_response_id=request.previous_response_id or None,
        echoed=_echoed(request),
    )
    return options, _messages(request)


def references_of(request: ResponsesRequest) -> tuple[tuple[int, str], ...]:
    """The items that the input refers to: where in it, and their ids. Raises :class:`ApiError` ``invalid`` for one
    without an id."""
    items = request.input if isinstance(request.input, list) else ()
    places = [(i, item) for i, item in enumerate(items) if item.type == REFERENCE]
    return tuple([(i, required(item.id, f"input[{i}].id")) for i, item in places])


def input_items(body: bytes) -> bytes:
    """The JSON of the items of a request's input, with commas between. Text is an item; none says nothing. Raises
    :class:`ApiError` ``invalid`` for what was passed over as no field of an item, and is no JSON."""
    try:
        given = msgspec.json.decode(body).get("input") or []
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"Invalid value for 'input': {error}.", "input", "invalid_value") from None
    items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
    return msgspec.json.encode(items)[1:-1]


def with_input(body: bytes, items: bytes) -> bytes:
    """The same request with another input: a JSON array of items."""
    return _with(body, {"input": msgspec.Raw(items)})


def self_contained(body: bytes) -> bytes:
    """The same request, as another server is sent it: its input is whole, and the answer would have an id that only
    that server knows. So it is to store nothing, and to look for nothing that is stored."""
    return _with(body, {"store": msgspec.Raw(b"false")}, without="previous_response_id")


def _with(body: bytes, fields: dict[str, msgspec.Raw], without: str = "") -> bytes:
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw]) | fields
    given.pop(without, None)
    return msgspec.json.encode(given)


def _echoed(request: ResponsesRequest) -> dict[str, Any]:
    text, reasoning = request.text or TextOptions(), request.reasoning or ReasoningOptions()
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": _plain(text.format or TextFormat()), "verbosity": text.verbosity or "medium"},
        "tool_choice": _plain(request.tool_choice or "auto"),
        "tools": [_plain(tool) for tool in request.tools or ()],
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "top_logprobs": request.top_logprobs or 0,
    }


def _plain(value: Any) -> Any:
    """Without what was not given, but a function's ``parameters`` and ``strict``, which clients expect."""
    if not isinstance(value, msgspec.Struct):
        return value
    kept = ("parameters", "strict") if isinstance(value, ResponsesTool) and value.type == "function" else ()
    found = msgspec.to_builtins(value)
    return {name: each for name, each in found.items() if each not in (None, []) or name in kept}


def _tools(request: ResponsesRequest) -> tuple[list[Tool], Any]:
    """The functions among the tools, those that are allowed, and the choice among them."""
    functions = [
        (required(tool.name, f"tools[{i}].name"), f"tools[{i}]", tool)
        for i, tool in enumerate(request.tools or ())
        if tool.type == "function"
    ]
    choice: Any = request.tool_choice
    if isinstance(choice, ResponsesChoice):
        if choice.type == "function":
            choice = ToolChoice(ChosenFunction(required(choice.name, "tool_choice.name")))
        elif choice.type == "allowed_tools":
            names = [str(tool.get("name")) for tool in choice.tools if tool.get("type", "function") == "function"]
            check_allowed(names, [each[0] for each in functions])
            functions, choice = [each for each in functions if each[0] in names], choice.mode or "auto"
        else:
            at = "tool_choice.type"
            raise bad_request(f"{at} is {choice.type[:32]!r}; this server calls functions only.", at)
    found = [
        function_tool(at, name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
        for name, at, tool in functions
    ]
    return found, choice if found or choice not in ("auto", "none") else None


def _response_format(form: TextFormat | None) -> ResponseFormat | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ResponseFormat("json_object")
    return ResponseFormat("json_schema", JsonSchemaFormat(form.schema, form.name, form.description, form.strict))


def _messages(request: ResponsesRequest) -> list[Message]:
    items = [Item(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    found = [Message("system", request.instructions)] if request.instructions else []
    for i, item in enumerate(items):
        _add(found, item, f"input[{i}]")
    return system_first(found)


def _add(found: list[Message], item: Item, at: str) -> None:
    """Reasoning, a text and calls that follow each other are one turn of the assistant."""
    if item.type == "message":
        if item.role is None:
            raise bad_request(f"Missing required field '{at}.role'.", f"{at}.role", "missing_required_parameter")
        content = _content(item.content, f"{at}.content")
        if item.role == "assistant" and found and _is_open(found[-1]) and not found[-1].content:
            found[-1].content = content
        else:
            found.append(Message(item.role, content))
    elif item.type in ("function_call", "custom_tool_call"):
        given = item.arguments or "" if item.input is None else {"input": item.input}
        function = MessageFunction(required(item.name, f"{at}.name"), given)
        call = MessageToolCall(function, required(item.call_id, f"{at}.call_id"))
        if not found or found[-1].role != "assistant":
            found.append(Message("assistant"))
        calls = found[-1].tool_calls = found[-1].tool_calls or []
        calls.append(call)
    elif item.type in ("function_call_output", "custom_tool_call_output"):
        said = _content(item.output, f"{at}.output")
        found.append(Message("tool", said or "", tool_call_id=required(item.call_id, f"{at}.call_id")))
    elif item.type == "reasoning":
        parts = item.content if isinstance(item.content, list) and item.content else item.summary
        thought = "\n".join([part.text or "" for part in parts or ()])
        if thought:
            found.append(Message("assistant", reasoning_content=thought))
    elif item.type != REFERENCE and TOLERATED.fullmatch(item.type) is None:
        known = "message, function_call, function_call_output or reasoning"
        raise bad_request(f"{at} has type {item.type[:32]!r}, expected {known}.", at, "invalid_value")


def _is_open(message: Message) -> bool:
    """Whether an assistant has thought, and not spoken yet."""
    return message.role == "assistant" and not message.tool_calls


def _content(content: str | list[Part] | None, at: str) -> str | list[ContentPart] | None:
    """With the names that chats have for its parts."""
    if not isinstance(content, list):
        return content
    return [_part(part) for part in content]


def _part(part: Part) -> ContentPart:
    if part.type == "refusal":
        return ContentPart("text", part.refusal or "")
    kind = "text" if part.type in TEXTS else part.type
    return ContentPart(kind, part.text, prompt_cache_breakpoint=part.prompt_cache_breakpoint)
