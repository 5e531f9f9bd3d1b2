"""The body of ``/v1/chat/completions``: what it says of tools in other notations, as ``tools`` and ``tool_choice``."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from engine.service.errors import bad_request
from engine.service.protocol import ChatRequest, ChosenFunction, Tool, ToolChoice


def settle_tools(request: ChatRequest) -> None:
    """Make ``tools`` and ``tool_choice`` of ``functions`` and ``function_call``, their older names, and of a choice of
    allowed tools. Raises :class:`ApiError` ``invalid``."""
    if request.functions:
        if request.tools:
            raise bad_request("functions is the older name of tools; expected one of them.", "functions")
        request.tools = [Tool("function", function) for function in request.functions]
        named = request.function_call
        request.tool_choice = ToolChoice(named) if isinstance(named, ChosenFunction) else named
        request.parallel_tool_calls = False
    elif isinstance(request.function_call, ChosenFunction):
        raise bad_request("function_call asks for a call, and there are no functions.", "function_call")
    choice = request.tool_choice
    if not isinstance(choice, ToolChoice):
        return
    if choice.type == "allowed_tools":
        allowed = choice.allowed_tools
        if allowed is None:
            at = "tool_choice.allowed_tools"
            raise bad_request(f"Missing required field {at!r}.", at, "missing_required_parameter")
        names = [tool.function.name for tool in allowed.tools if tool.function is not None]
        known = [tool.function.name for tool in request.tools or () if tool.function is not None]
        check_allowed(names, known)
        # The model is shown those alone: where it may write what it likes, it calls what it has seen.
        request.tools = [tool for tool in request.tools or () if tool.function and tool.function.name in names]
        request.tool_choice = allowed.mode
    elif choice.type != "function":
        at = "tool_choice.type"
        raise bad_request(f"{at} is {choice.type[:32]!r}; this server calls functions only.", at)
    elif choice.function is None:
        at = "tool_choice.function"
        raise bad_request(f"Missing required field {at!r}.", at, "missing_required_parameter")


def check_allowed(names: Iterable[str], known: Collection[str]) -> None:
    """Raises :class:`ApiError` ``invalid`` where functions are allowed that are not among the tools."""
    if wrong := next((name for name in names if name not in known), None):
        raise bad_request(f"tool_choice: no function of tools is named {wrong[:64]!r}.", "tool_choice")
