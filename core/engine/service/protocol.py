"""The request bodies of the API, field by field, with their types and ranges.

``null`` means the same as leaving the field out, at every depth. A field that is not listed here is either ignored
because it cannot change the output (:data:`IGNORED`), accepted while it asks for nothing special (:data:`NEUTRAL`), or
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from engine.service.allowed_words import allowed_words
from engine.service.errors import ApiError, bad_request

INT64 = 2**63 - 1
DEFAULT_COMPLETION_TOKENS = 16
MOST_QUOTED = 200
"""Characters of a request that an error message repeats."""

IGNORED: frozenset[str] = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "moderation",
        "verbosity",
        "web_search_options",
        "prediction",
        "cache_prompt",
        "keep_alive",
        "num_ctx",
        "mirostat",
        "mirostat_tau",
        "mirostat_eta",
        "reasoning_effort",
        "enable_thinking",
        "think",
    }
)
"""Accepted and without effect, unless they are fields of the request: bookkeeping of other services, what only other
models or engines do with a prompt, and in completions what would be said to a chat template."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "suffix": ("",),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
}
"""Not supported, but these values ask for what happens anyway."""

UnitInterval = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
OutputLimit = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""How many tokens an output may have; -1: as many as there is room for."""
StopString = Annotated[str, Meta(min_length=1, max_length=512)]
Stops = StopString | Annotated[list[StopString], Meta(max_length=16)]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TemplateVariables = Annotated[dict[str, Any], Meta(max_length=64)]
"""Variables of the model's chat template, by name. What it makes of them is its own."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Without effect."""


class CacheControl(msgspec.Struct):
    """The prompt up to here is to stay cached, in the words of Anthropic's API."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class CacheBreakpoint(msgspec.Struct):
    """The same in those of OpenAI's."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class CacheOptions(msgspec.Struct):
    """``mode``: ``implicit`` (the default) is a breakpoint at the end of the prompt, too."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class MessageFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""
    """JSON, as text or as it is."""


class MessageToolCall(msgspec.Struct):
    function: MessageFunction
    id: str = ""
    type: str = "function"


FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]


class Function(msgspec.Struct, omit_defaults=True):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON Schema of an object; ``None``: any object."""
    strict: bool | None = None
    """Arguments follow the schema whenever the function is called; without, only where a call is asked for."""


class Tool(msgspec.Struct):
    type: str = "function"
    function: Function | None = None
    cache_control: CacheControl | None = None


class ChosenFunction(msgspec.Struct):
    name: str


class AllowedTool(msgspec.Struct):
    type: str = "function"
    function: ChosenFunction | None = None


class AllowedTools(msgspec.Struct):
    """Those of the tools that may be called, or of which one must."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(max_length=512)]


class ToolChoice(msgspec.Struct):
    """The function that must be called; in a request perhaps which tools may be."""

    function: ChosenFunction | None = None
    type: str = "function"
    allowed_tools: AllowedTools | None = None

    @property
    def chosen(self) -> str:
        assert self.function is not None, "a request without one is refused"
        return self.function.name


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One turn. ``developer`` is the newer name of ``system``; ``tool`` says what a call came to, and so did once
    ``function``, with the name of the function."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    cache_control: CacheControl | None = None
    id: str | None = None
    """Without effect; so are the next ones, which clients keep beside answers."""
    thinking_blocks: Any = None
    provider_specific_fields: Any = None
    reasoning_details: Any = None
    tool_calls: list[MessageToolCall] | None = None
    """Calls that an assistant has asked for."""
    tool_call_id: str | None = None
    """The call that a message of the role ``tool`` answers."""
    function_call: MessageFunction | None = None
    """The older notation of one call."""
    audio: Any = None


Schema = dict[str, Any] | bool
"""A JSON Schema."""


class JsonSchemaFormat(msgspec.Struct):
    schema: Schema | None = None
    """``None``: any JSON object."""
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """Without effect: a schema is always enforced."""


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What the output must look like. ``schema`` with ``json_object``, ``pattern`` with ``regex`` and ``grammar`` (in
    the notation of Lark) with ``grammar`` are what other servers take, too."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchemaFormat | None = None
    schema: Schema | None = None
    pattern: str | None = None
    grammar: str | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """The same as vLLM spells it: one of these."""

    json: Schema | str | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(max_length=1024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """The body of a request."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    """More fields that are accepted and without effect; see :data:`IGNORED`."""
    verbatim: ClassVar[frozenset[str]] = frozenset({"tools"})
    """Fields with a JSON schema or the arguments of a call, in which null means null."""

    model: str | None = None


class CommonOptions(Body, kw_only=True):
    """What requests that generate share, whatever API they are of."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: UnitInterval | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """0 and -1 mean no limit."""
    min_p: UnitInterval | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=INT64)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    """Logits are divided by it: much less than 0.01 would leave the range of float32."""
    stream: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    """Who sent the request: the queue is fair among users. Without it, clients are told apart by their addresses."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: CacheOptions | None = None


class GenerationRequest(CommonOptions, kw_only=True):
    """What chat and completion requests share."""

    verbatim = frozenset({"response_format", "structured_outputs", "guided_json", "json_schema", "tools", "functions"})
    kind: ClassVar[str]
    """The kind of request, as routers know it."""
    id_prefix: ClassVar[str]
    default_tokens: ClassVar[int | None] = None
    """Most output tokens of a request that says nothing; ``None``: all the room that the prompt leaves."""
    fits_output: ClassVar[bool] = False
    """A request for more output tokens than there is room for gets all the room; otherwise it is refused."""

    stop: Stops | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    max_tokens: OutputLimit | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    """A stream of one sequence also shows how far its prompt is, as ``prompt_progress``."""
    return_token_ids: bool | None = None
    """The answer has the token ids of prompt and output beside their text."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(max_length=1024)] | None = None
    guided_grammar: str | None = None
    json_schema: Schema | None = None
    grammar: str | None = None
    """In GBNF."""

    @property
    def echoes(self) -> bool:
        """Whether the prompt is part of the answer."""
        return False

    @property
    def format_field(self) -> str:
        """Which field :attr:`response_format` came by."""
        return "response_format"

    @property
    def schema_field(self) -> str:
        """Which one its schema came by."""
        return "response_format.json_schema.schema"

    def num_choices(self) -> int:
        """Choices of each prompt. Raises :class:`ApiError` ``invalid``."""
        return self.n or 1

    def num_logprobs(self) -> int | None:
        """How many alternatives per token are wanted; ``None``: no logprobs at all. Raises :class:`ApiError`
        ``invalid``."""
        raise NotImplementedError

    def asked_tokens(self) -> tuple[int | None, str]:
        """Most output tokens, and the name of the field that says so."""
        return self.max_tokens, "max_tokens"


class ChatOptions(GenerationRequest, kw_only=True):
    """A chat request but for its messages."""

    kind = "chat"
    id_prefix = "chatcmpl-"

    max_completion_tokens: OutputLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    enable_thinking: bool | None = None
    think: bool | Effort | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    """False: the answer leaves out what the model thought."""
    thinking_token_budget: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Most tokens of a thought."""
    tools: Annotated[list[Tool], Meta(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: one call at most is asked for, and shown."""
    functions: Annotated[list[Function], Meta(max_length=512)] | None = None
    """The older name of ``tools``: the answer has ``function_call`` then."""
    function_call: Literal["none", "auto"] | ChosenFunction | None = None
    cache_control: CacheControl | None = None
    """A breakpoint at the end of the last message."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise bad_request(f"{name!r} is 0, expected at least 1, or -1 for no limit.", name, "invalid_value")

    def num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def asked_tokens(self) -> tuple[int | None, str]:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return super().asked_tokens()


class ChatRequest(ChatOptions, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]


class CompletionOptions(GenerationRequest, kw_only=True):
    """A completion request but for its prompt."""

    kind = "completion"
    id_prefix = "cmpl-"
    default_tokens = DEFAULT_COMPLETION_TOKENS

    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    """With ``logprobs`` and a ``max_tokens`` of 0, the prompt is scored and nothing is generated."""
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    def num_choices(self) -> int:
        """``best_of`` may only repeat ``n``, since candidates are not ranked here."""
        n = super().num_choices()
        if self.best_of not in (None, n):
            raise bad_request(f"best_of={self.best_of} is not supported unless it equals n={n}.", "best_of")
        return n

    def num_logprobs(self) -> int | None:
        return self.logprobs


class CompletionRequest(CompletionOptions, kw_only=True):
    prompt: str | list[str | int | list[int]]
    """Text, texts, token ids or lists of those."""


class TokenizeRequest(Body, kw_only=True):
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    enable_thinking: bool | None = None
    think: bool | Effort | None = None
    reasoning_effort: Effort | None = None
    tools: Annotated[list[Tool], Meta(max_length=512)] | None = None


class DetokenizeRequest(Body, kw_only=True):
    tokens: list[TokenId]


T = TypeVar("T", bound=Body)

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_AT = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`")


def decode(body: bytes, kind: type[T]) -> T:
    """Parse and check a request body.

    Raises :class:`ApiError` ``invalid`` naming the field: malformed JSON, NaN and infinities, numbers out of range,
    lone surrogates, absurd nesting, wrong types, unknown fields and unsupported ones.
    """
    try:
        fields = _FIELDS.decode(body)
    except msgspec.ValidationError:
        raise bad_request("The request body must be a JSON object.") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"The request body is not valid JSON: {_explain(error)}.") from None
    _refuse_unknown(fields, kind.ignored.union(kind.__struct_fields__))
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        wrong = str(error)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"The request body is not valid JSON: {_explain(error)}.") from None
    if b"null" in body:
        try:
            return msgspec.convert(_plain(fields, kind.verbatim), kind)
        except msgspec.ValidationError as error:
            wrong = str(error)
    raise field_error(wrong, fields, kind)


def _explain(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return str(error)


def _refuse_unknown(fields: dict[str, msgspec.Raw], known: frozenset[str]) -> None:
    for name, raw in fields.items():
        if name in known or name in IGNORED or bytes(raw).strip() == b"null":
            continue
        shown = name[:64]
        if name not in NEUTRAL:
            raise bad_request(f"Unknown field {shown!r}: this server does not know it.", shown, "unknown_parameter")
        try:
            value = _without_nulls(msgspec.json.decode(raw))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            value = NotImplemented
        if value not in NEUTRAL[name]:
            raise bad_request(
                f"{shown!r} is not supported by this server; leave it out.", shown, "unsupported_parameter"
            )


def _plain(fields: dict[str, msgspec.Raw], verbatim: frozenset[str]) -> dict[str, Any]:
    plain = {}
    for name, raw in fields.items():
        try:
            plain[name] = msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            why = _AT.sub("", _explain(error))
            raise bad_request(f"Invalid value for {name[:64]!r}: {why}.", name[:64], "invalid_value") from None
    return {name: value if name in verbatim else _without_nulls(value) for name, value in plain.items()}


def _without_nulls(value: Any) -> Any:
    """JSON without the members that are null; items of arrays stay where they are."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def field_error(
    message: str, fields: Mapping[str, msgspec.Raw] = MappingProxyType({}), kind: type[msgspec.Struct] | None = None
) -> ApiError:
    """What msgspec says of a field, in the words of the API. ``fields``: as they came, to be shown; ``kind``: what they
    were to be."""
    at = _AT.search(message)
    path = at.group(1)[:128] if at else ""
    text = _AT.sub("", message)
    if len(text) > MOST_QUOTED:
        text = text[:MOST_QUOTED] + "..."
    if unknown := _UNKNOWN.match(text):
        path = f"{path}.{unknown.group(1)}".lstrip(".")[:128]
        return bad_request(f"Unknown field {path!r}.", path, "unknown_parameter")
    if missing := re.match(r"Object missing required field `(.*?)`", text):
        path = f"{path}.{missing.group(1)}".lstrip(".")
        return bad_request(f"Missing required field {path!r}.", path, "missing_required_parameter")
    raw = bytes(fields[path]) if path in fields else b""
    if kind is not None and text.startswith("Invalid enum value") and (words := allowed_words(kind, path)):
        text += f", expected one of {', '.join(words)}"
    got = f", got {raw.decode()}" if 0 < len(raw) <= 40 and "got" not in text else ""
    return bad_request(f"Invalid value for {path!r}: {text[:1].lower()}{text[1:]}{got}.", path, "invalid_value")
