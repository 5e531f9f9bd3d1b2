"""The tools of a request: what its output may call, and what it must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.contracts.constraint import Grammar
from engine.service.errors import bad_request
from engine.service.protocol import ChatOptions, GenerationRequest, ToolChoice
from engine.service.tokenizer import Tokenizer
from engine.service.tool_parser import ToolParser
from engine.service.tool_syntax import CallSyntax, call_grammar


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the calls in a request's output are found."""

    syntax: CallSyntax
    functions: Mapping[str, Mapping[str, Any]]
    """Schemas of the parameters, by the name of the function."""
    most: int | None
    """Calls that are kept; ``None``: all."""
    shows_special: bool
    """The syntax has a special token, which must be seen."""
    must_call: bool
    """The output consists of calls alone."""
    is_named: bool
    """One function must be called, as the client said: the output ends with ``stop``."""

    def parser(self) -> ToolParser:
        return ToolParser(self.syntax, self.functions, self.most, self.must_call)


def functions_of(options: ChatOptions) -> list[dict[str, Any]]:
    """Those that may be called, as plain values. Raises :class:`ApiError` ``invalid`` for tools of other kinds, and for
    a choice of what there is not."""
    found: list[dict[str, Any]] = []
    for i, tool in enumerate(options.tools or ()):
        if tool.type != "function" or tool.function is None:
            at = f"tools[{i}]"
            raise bad_request(f"{at} has type {tool.type[:32]!r}; only functions are supported, with a 'function'.", at)
        if (tool.function.parameters or {}).get("type", "object") != "object":
            at = f"tools[{i}].function.parameters"
            raise bad_request(f"{at}.type is not 'object': a function's parameters are the properties of one.", at)
        found.append(msgspec.to_builtins(tool.function))
    names = [function["name"] for function in found]
    if len(set(names)) < len(names):
        raise bad_request("tools: two functions have the same name.", "tools")
    choice = options.tool_choice
    if not found and (choice == "required" or isinstance(choice, ToolChoice)):
        raise bad_request("tool_choice asks for a call, and there are no tools.", "tool_choice")
    if isinstance(choice, ToolChoice) and choice.chosen not in names:
        raise bad_request(f"tool_choice: no function of tools is named {choice.chosen[:64]!r}.", "tool_choice")
    return [] if choice == "none" else found


def tool_use(options: GenerationRequest, tokenizer: Tokenizer) -> ToolUse | None:
    """``None`` for a request without tools. Raises :class:`ApiError` ``invalid`` where the model's template teaches no
    syntax of calls that can be read."""
    if not isinstance(options, ChatOptions) or not (functions := functions_of(options)):
        return None
    syntax = tokenizer.call_syntax
    if syntax is None:
        raise bad_request("tools: this model's chat template has no syntax of calls that this server reads.", "tools")
    is_named = isinstance(options.tool_choice, ToolChoice)
    most = 1 if options.parallel_tool_calls is False or is_named else None
    schemas = {function["name"]: function.get("parameters") or {} for function in functions}
    shows_special = any(map(tokenizer.spells_special, syntax.texts))
    must_call = is_named or options.tool_choice == "required"
    return ToolUse(syntax, schemas, most, shows_special, must_call, is_named)


def tool_grammar(
    options: GenerationRequest, use: ToolUse | None, special_ids: Mapping[str, int], asked: Grammar | None
) -> Grammar | None:
    """The grammar of an output that may or must call tools. ``asked``: of an output that calls none, where the request
    describes it. Where nothing is described and nothing must be called, calls of ``strict`` functions have a grammar
    in any text."""
    if use is None or not isinstance(options, ChatOptions):
        return asked
    functions = _callable(options, functions_of(options))
    in_text = not use.must_call and asked is None
    if in_text:
        if not any(function.get("strict") for function in functions):
            return None
        functions = [each if each.get("strict") else {"name": each["name"]} for each in functions]
    otherwise = None if use.must_call or asked is None else _schema(asked)
    if otherwise is None and asked is not None and not use.must_call:
        raise bad_request("With tools, only a JSON schema may describe the rest of the output.", "tools")
    several = use.most is None
    return call_grammar(use.syntax, functions, special_ids, several=several, otherwise=otherwise, in_text=in_text)


def answer_grammar(options: GenerationRequest, tokenizer: Tokenizer, asked: Grammar | None) -> Grammar | None:
    """The grammar of an output without tools. What is ``asked`` of an answer that is one message of several holds for
    that one. Raises :class:`ApiError` ``invalid`` where only a schema can."""
    if asked is None or not isinstance(options, ChatOptions):
        return asked
    syntax = tokenizer.call_syntax
    if syntax is None or not syntax.answer:
        return asked
    if (schema := _schema(asked)) is None:
        has = f"This model's answer is one message of several ({syntax.name})"
        raise bad_request(f"{has}: only a JSON schema may describe it.", "response_format")
    return call_grammar(syntax, (), tokenizer.special_ids, otherwise=schema)


def _callable(options: ChatOptions, functions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    choice = options.tool_choice
    return [each for each in functions if not isinstance(choice, ToolChoice) or each["name"] == choice.chosen]


def _schema(grammar: Grammar) -> dict[str, Any] | None:
    """``None`` for a grammar that is no schema of an object."""
    if grammar.kind == "json_object":
        return {"type": "object"}
    found = msgspec.json.decode(grammar.text) if grammar.kind == "json_schema" else None
    return found if isinstance(found, dict) else None
