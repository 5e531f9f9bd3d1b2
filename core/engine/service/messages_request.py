"""The body of ``/v1/messages`` (Anthropic's API), and the chat that it asks for."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.service.errors import bad_request
from engine.service.protocol import (
    CacheControl,
    ChatOptions,
    ChosenFunction,
    CommonOptions,
    ContentPart,
    Effort,
    JsonSchemaFormat,
    Message,
    MessageFunction,
    MessageToolCall,
    ResponseFormat,
    Schema,
    StopString,
    TemplateVariables,
    Tool,
    ToolChoice,
)
from engine.service.translating import BETWEEN, Joined, Mark, common, function_tool, required, system_first

BILLING = "x-anthropic-billing-header:"
"""Some clients begin the system prompt with a line of bookkeeping that differs from request to request: with it, no
prompt would begin like another."""


OF_OTHERS = re.compile(r"redacted_thinking|server_tool_use|mcp_tool_use|\w+_tool_result|container_upload|compaction")
"""Kinds of blocks that say what another service did by itself: the model here is not told."""


class Block(msgspec.Struct):
    """A part of a content."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | dict[str, Any] | None = None
    source: dict[str, Any] | str | None = None
    cache_control: CacheControl | None = None
    is_error: bool | None = None
    """Without effect: what the tool said speaks for itself."""


class MessagesTurn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(msgspec.Struct):
    """A function that the model may call, or with another ``type`` than ``custom`` a tool that other services run."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: CacheControl | None = None


class MessagesChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Most tokens of a thought."""
    display: str | None = None
    """Without effect."""


class OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: Schema | None = None


class OutputConfig(msgspec.Struct):
    effort: Effort | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct):
    user_id: Annotated[str, Meta(max_length=512)] | None = None


class CountRequest(CommonOptions, kw_only=True):
    """What of a request is its prompt. ``/v1/messages/count_tokens`` takes this."""

    ignored = frozenset({
        "anthropic_version", "betas", "container", "context_management", "diagnostics",
        "inference_geo", "max_tokens", "speed", "stop_sequences",
    })  # fmt: skip
    verbatim = frozenset({"tools", "messages", "output_config", "output_format"})

    messages: Annotated[list[MessagesTurn], Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=512)] | None = None
    tool_choice: MessagesChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of ``output_config.format``."""
    metadata: Metadata | None = None
    cache_control: CacheControl | None = None
    mcp_servers: Annotated[list[Any], Meta(max_length=0)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    """What the API does not have, and this server does."""


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """``None``: all the room that the prompt leaves."""
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None


class MessagesOptions(ChatOptions, kw_only=True):
    """The chat that a request asks for. The model thinks where the client asks for it; thoughts that it did not ask for
    are left out."""

    kind = "messages"
    id_prefix = "msg_"
    fits_output = True

    uses_output_format: bool = False
    """The format of the output came by its older name."""

    @property
    def format_field(self) -> str:
        return "output_format" if self.uses_output_format else "output_config.format"

    @property
    def schema_field(self) -> str:
        return f"{self.format_field}.schema"


def messages_chat(request: CountRequest) -> tuple[MessagesOptions, list[Message]]:
    """Raises :class:`ApiError` ``invalid`` for what this server does not take in a conversation."""
    choice = request.tool_choice or MessagesChoice("auto")
    config = request.output_config or OutputConfig()
    form = config.format or request.output_format
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    described = None if form is None else ResponseFormat("json_schema", JsonSchemaFormat(form.schema))
    fields = common(request)
    if request.user is None and request.metadata is not None:
        fields["user"] = request.metadata.user_id
    options = MessagesOptions(
        **fields,
        max_tokens=getattr(request, "max_tokens", None),
        stop=getattr(request, "stop_sequences", None),
        chat_template_kwargs=request.chat_template_kwargs,
        enable_thinking=thinks,
        include_reasoning=thinks,
        thinking_token_budget=request.thinking.budget_tokens if request.thinking and thinks else None,
        reasoning_effort=config.effort,
        tools=_tools(request.tools or []),
        tool_choice=_choice(choice),
        parallel_tool_calls=False if choice.disable_parallel_tool_use else None,
        response_format=described,
        uses_output_format=form is not None and config.format is None,
        cache_control=request.cache_control,
    )
    return options, _messages(request)


def _tools(tools: list[MessagesTool]) -> list[Tool]:
    return [
        function_tool(
            f"tools[{i}]",
            name=required(tool.name, f"tools[{i}].name"),
            description=tool.description,
            parameters=tool.input_schema,
            cache_control=tool.cache_control,
        )
        for i, tool in enumerate(tools)
        if tool.type in (None, "custom")
    ]


def _choice(choice: MessagesChoice) -> Any:
    if choice.type == "tool":
        return ToolChoice(ChosenFunction(required(choice.name, "tool_choice.name")))
    return "required" if choice.type == "any" else choice.type


def _messages(request: CountRequest) -> list[Message]:
    found = [system] if (system := _system(request.system)).content else []
    for i, turn in enumerate(request.messages):
        found += _turn(turn, f"messages[{i}]")
    if found[-1].role == "assistant":
        raise bad_request(
            "The last message is the assistant's; this server begins a new one, it does not go on with it.", "messages"
        )
    return system_first(found)


def _system(system: str | list[Block] | None) -> Message:
    blocks = system if isinstance(system, list) else [Block("text", system)]
    text, marks = "", list[Mark]()
    for block in blocks:
        if block.text and not block.text.startswith(BILLING):
            text += BETWEEN * bool(text) + block.text
        if block.cache_control is not None:
            marks.append((len(text), block.cache_control))
    return Joined("system", text, marks=marks)


def _turn(turn: MessagesTurn, at: str) -> list[Message]:
    """What tools came to are messages of their own."""
    if isinstance(turn.content, str):
        return [Message(turn.role, turn.content)]
    if turn.role == "assistant":
        return [_answer(turn.content, at)]
    found: list[Message] = []
    parts: list[ContentPart] = []

    def said() -> None:
        if parts:
            found.append(Message(turn.role, list(parts)))
            parts.clear()

    for i, block in enumerate(turn.content):
        if block.type == "tool_result":
            said()
            found.append(_result(block, f"{at}.content[{i}]"))
        else:
            parts.append(_part(block))
    said()
    return found or [Message(turn.role, "")]


def _part(block: Block) -> ContentPart:
    """Documents and results of a search that are text are told as text."""
    if block.type == "document" and isinstance(block.source, dict) and block.source.get("type") == "text":
        return ContentPart("text", str(block.source.get("data") or ""), block.cache_control)
    if block.type == "search_result" and isinstance(block.content, list):
        return ContentPart("text", "\n".join([part.text or "" for part in block.content]), block.cache_control)
    return ContentPart(block.type, block.text, block.cache_control)


def _answer(blocks: list[Block], at: str) -> Message:
    text, thoughts = "", []
    calls: list[MessageToolCall] = []
    marks: list[Mark] = []
    for i, block in enumerate(blocks):
        where = f"{at}.content[{i}]"
        if block.type == "text":
            text += block.text or ""
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            function = MessageFunction(required(block.name, f"{where}.name"), block.input or {})
            calls.append(MessageToolCall(function, required(block.id, f"{where}.id")))
        elif OF_OTHERS.fullmatch(block.type) is None:
            expected = "text, thinking or tool_use"
            raise bad_request(f"{where} has type {block.type[:32]!r}, expected {expected}.", where, "invalid_value")
        if block.cache_control is not None:
            marks.append((None if calls else len(text), block.cache_control))
    thought = "".join(thoughts) or None
    return Joined("assistant", text, reasoning_content=thought, tool_calls=calls or None, marks=marks)


def _result(block: Block, at: str) -> Message:
    content, marked = block.content, block.cache_control
    if isinstance(content, list):
        marked = marked or next((part.cache_control for part in reversed(content) if part.cache_control), None)
        parts = [_part(part) for part in content]
        for i, part in enumerate(parts):
            if part.type != "text":
                where = f"{at}.content[{i}]"
                raise bad_request(f"{where} has type {part.type[:32]!r}; this server computes text only.", where)
        content = "\n".join([part.text or "" for part in parts])
    if isinstance(content, dict):
        raise bad_request(f"{at}.content is an object, expected text or a list of blocks.", f"{at}.content")
    answers = required(block.tool_use_id, f"{at}.tool_use_id")
    return Message("tool", content or "", tool_call_id=answers, cache_control=marked)
