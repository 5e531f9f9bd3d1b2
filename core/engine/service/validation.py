"""From a well-typed API request to the engine's sampling parameters and prompts."""

from __future__ import annotations

import hashlib
import json
from typing import Any, TypeVar

import msgspec

from engine.contracts.constraint import Grammar
from engine.contracts.request import MAX_BIASED_TOKENS, ReasoningTokens, SamplingParams
from engine.contracts.router import ApiRequest
from engine.service.errors import ApiError, bad_request
from engine.service.protocol import (
    ChatOptions,
    ContentPart,
    GenerationRequest,
    Message,
    MessageToolCall,
    TokenizeRequest,
)
from engine.service.turns import FunctionCall, Role, TextPart, ToolCall, Turn

NO_LIMIT = -1
MOST_ECHOED = 2**16
"""Prompt tokens with log probabilities in one answer: about 200 bytes each."""

RESERVED = {"messages", "tools", "add_generation_prompt", "chat_template", "tokenize", "continue_final_message"}
"""Names that mean something else to a chat template, or to who calls it."""
MOST_NESTED = 16

Prompt = str | tuple[int, ...]
T = TypeVar("T", tuple[int, ...], list[int])


def sampling_params(
    request: GenerationRequest,
    max_tokens: int,
    vocab_size: int,
    grammar: Grammar | None = None,
    reasoning: ReasoningTokens | None = None,
) -> SamplingParams:
    """``max_tokens`` is already resolved, ``grammar`` checked. Raises :class:`ApiError` ``invalid`` for what types and
    ranges could not say."""
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens is {min_tokens}, more than the {max_tokens} output tokens allowed.", "min_tokens"
        )
    logprobs = request.num_logprobs()
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        # top_p=0 means: only the most likely token.
        top_p=1.0 if request.top_p is None else max(request.top_p, 1e-9),
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        seed=None if request.seed is None else request.seed & (2**63 - 1),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        stop_token_ids=_stop_token_ids(request.stop_token_ids or [], vocab_size),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=logprobs if request.echoes else None,
        grammar=grammar,
        reasoning=reasoning,
    )


def num_echoed(api: ApiRequest) -> int:
    """Prompt tokens in the answer, were they all echoed."""
    return sum(map(len, api.prompts)) * api.n


def check_echoed_logprobs(api: ApiRequest) -> None:
    """Raises :class:`ApiError` ``invalid`` when the log probabilities of prompts would fill hundreds of megabytes."""
    if api.sampling.prompt_logprobs is not None and (tokens := num_echoed(api)) > MOST_ECHOED:
        raise bad_request(
            f"echo with logprobs takes at most {MOST_ECHOED} prompt tokens in one request (prompts x n); got {tokens}.",
            "echo",
        )


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def choice_seed(seed: int | None, choice: int) -> int | None:
    """The seed of a choice: choices of one prompt differ, and choice 0 is what ``n=1`` gives."""
    if seed is None or choice == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{choice}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)


def split_prompts(prompt: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    """The prompts of a completion request: text, texts, ids, or lists of ids (never mixed)."""
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise bad_request("prompt is an empty list; expected at least one prompt or token id.", "prompt")
    texts = [item for item in prompt if isinstance(item, str)]
    ids = [item for item in prompt if isinstance(item, int)]
    lists = [tuple(item) for item in prompt if isinstance(item, list)]
    for same in (texts, lists):
        if len(same) == len(prompt):
            return tuple(same)
    if len(ids) == len(prompt):
        return (tuple(ids),)
    raise bad_request("prompt mixes text and token ids; expected one kind.", "prompt")


def check_token_ids(tokens: T, vocab_size: int, param: str = "prompt") -> T:
    """Raises :class:`ApiError` ``invalid`` naming the first id outside ``0 .. vocab_size - 1``."""
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        wrong = next(t for t in tokens if not 0 <= t < vocab_size)
        raise bad_request(f"Token id {_short(wrong)} is outside the vocabulary (0 to {vocab_size - 1}).", param)
    return tokens


def output_limit(asked: int | None, prompt_len: int, max_len: int, default: int | None, param: str) -> int:
    """Most output tokens. ``default=None``, and ``asked`` if it is -1, mean: all the room that the prompt leaves.

    Raises :class:`ApiError` ``invalid`` naming both lengths when prompt and output do not fit into ``max_len`` tokens.
    A prompt that fills them can be scored: ``asked`` is 0.
    """
    room = max_len - prompt_len
    if prompt_len < 1:
        raise bad_request("The prompt is empty; expected at least one token.", "prompt")
    if room < (0 if asked == 0 else 1):
        raise too_long(str(prompt_len), max_len, "messages" if default is None else "prompt")
    if asked is None:
        return room if default is None else min(default, room)
    if asked == NO_LIMIT:
        return room
    if asked > room:
        raise bad_request(
            f"The prompt has {prompt_len} tokens and {param} is {asked}: together more than the {max_len} tokens "
            f"this model takes. Ask for at most {room}.",
            param,
            "context_length_exceeded",
        )
    return asked


def too_long(length: str, max_len: int, param: str) -> ApiError:
    """``invalid``: the prompt alone fills the context; names both lengths."""
    return bad_request(
        f"The prompt has {length} tokens; this model takes at most {max_len} for prompt and output together.",
        param,
        "context_length_exceeded",
    )


def template_variables(request: ChatOptions | TokenizeRequest) -> dict[str, Any]:
    """What a request tells the chat template besides its messages: its ``chat_template_kwargs``, and below them what
    it says about reasoning, by the names that templates read."""
    given = request.chat_template_kwargs or {}
    if taken := sorted(RESERVED & given.keys()):
        at = f"chat_template_kwargs.{taken[0]}"
        raise bad_request(f"{at!r} is not a variable that a request can set.", at)
    if _is_deeper(given, MOST_NESTED):
        raise bad_request(f"chat_template_kwargs is nested more than {MOST_NESTED} deep.", "chat_template_kwargs")
    think, effort = request.think, request.reasoning_effort
    if isinstance(think, str):
        think, effort = None, effort or think
    enabled = request.enable_thinking if request.enable_thinking is not None else think
    if enabled is None and effort == "none":
        enabled = False
    told = {"reasoning_effort": effort, "enable_thinking": enabled, "thinking": enabled, **given}
    return {name: value for name, value in told.items() if value is not None}


def tools_of(request: ChatOptions | TokenizeRequest) -> tuple[dict[str, Any], ...]:
    """The tools that the chat template is given, also where none may be called: the prompt stays what it was."""
    functions = [tool for tool in request.tools or () if tool.function is not None]
    return tuple([{"type": tool.type, "function": msgspec.to_builtins(tool.function)} for tool in functions])


def _is_deeper(value: Any, most: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return most == 0 or any(_is_deeper(item, most - 1) for item in items)


def turns_of(messages: list[Message]) -> tuple[Turn, ...]:
    """The conversation. Raises :class:`ApiError` ``invalid`` for what this server does not take in one."""
    return tuple([_turn(message, f"messages[{i}]") for i, message in enumerate(messages)])


def _turn(message: Message, where: str) -> Turn:
    if message.audio:
        raise bad_request(f"'{where}.audio' is not supported by this server.", f"{where}.audio")
    role: Role
    answers = message.tool_call_id
    if message.role == "function":
        role, answers = "tool", message.name
        if not answers:
            raise bad_request(f"'{where}.name' is missing.", f"{where}.name")
    else:
        role = "system" if message.role == "developer" else message.role
    if message.content is None and role not in ("assistant", "tool"):
        raise bad_request(f"'{where}.content' is missing.", f"{where}.content")
    if role == "tool" and not answers:
        raise bad_request(f"'{where}.tool_call_id' is missing.", f"{where}.tool_call_id")
    if (message.tool_calls or message.function_call) and role != "assistant":
        raise bad_request(f"'{where}.tool_calls': only an assistant calls tools.", f"{where}.tool_calls")
    content = _content(message.content, where)
    calls = [_call(call) for call in message.tool_calls or ()]
    if (called := message.function_call) is not None:
        calls.append(_call(MessageToolCall(called, called.name)))  # its function's message has nothing but the name
    reasoning = message.reasoning_content, message.reasoning
    return Turn(role, content, message.name, *reasoning, calls, answers)


def _call(call: MessageToolCall) -> ToolCall:
    """Arguments that are no JSON object are none: a model that wrote them may go on."""
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(text := arguments, parse_int=_number, parse_constant=_refuse)
            if "\\u" in text:
                json.dumps(arguments, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        except (ValueError, RecursionError):
            arguments = {}
    return ToolCall(call.id, FunctionCall(call.function.name, arguments if isinstance(arguments, dict) else {}))


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and infinities are no JSON


def _number(digits: str) -> int | float:
    """An integer, as far as templates can be given it."""
    return int(digits) if len(digits) < 19 else float(digits)


def _content(content: str | list[ContentPart] | None, where: str) -> str | list[TextPart]:
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            at = f"{where}.content[{i}]"
            found = f"type {part.type[:32]!r}" if part.type != "text" else "no 'text'"
            only = "this server computes text only, of models that see images, too"
            raise bad_request(f"'{at}' has {found}, expected type 'text' with a 'text': {only}.", at)
    return [TextPart(part.text or "") for part in content]


def check_bias_size(bias: dict[str, float] | None) -> None:
    """Raises :class:`ApiError` ``invalid`` for a ``logit_bias`` of more tokens than the engine takes."""
    if bias is not None and len(bias) > MAX_BIASED_TOKENS:
        raise bad_request(f"logit_bias names {len(bias)} tokens; at most {MAX_BIASED_TOKENS}.", "logit_bias")


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    check_bias_size(bias)
    result = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise bad_request(f"logit_bias key {key[:32]!r} is not a token id (0 to {vocab_size - 1}).", "logit_bias")
        result[int(key)] = value
    return result


def _stop_token_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    return check_token_ids(tuple(ids), vocab_size, "stop_token_ids")


def _short(number: int) -> str:
    # Printing an integer of thousands of digits is refused by Python itself.
    return str(number) if abs(number) < 10**20 else f"of {number.bit_length()} bits"
