"""What each Python library is asked for, in an environment that has it."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

ANSWER = "Serialize ``obj`` to a JSON formatted ``str``."
QUESTION = [{"role": "user", "content": "What does json.dumps do?"}]
ASK: dict[str, Any] = {"model": "bundled", "messages": QUESTION, "temperature": 0, "max_tokens": 80}
PROMPT = "class Counter(dict):\n    def"
COMPLETE: dict[str, Any] = {"model": "bundled", "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
ADDED: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "x", "parameters": ADDED}}
ANSWERED: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"type": "boolean"}},
    "required": ["answer"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWERED, "strict": True}}
PLAIN: dict[str, Any] = {
    "reasoning_effort": "low", "verbosity": "low", "user": "u", "metadata": {"a": "b"}, "store": False,
    "service_tier": "auto", "safety_identifier": "u", "prompt_cache_key": "k", "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"}, "web_search_options": {}, "n": None, "stop": None, "seed": None,
    "logit_bias": None, "response_format": {"type": "text"}, "presence_penalty": 0, "frequency_penalty": 0,
}  # fmt: skip
"""Fields of OpenAI's API that must not turn a client away, nor change the text."""
BESIDE: dict[str, Any] = {
    "chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": False, "think": False, "cache_prompt": True,
    "num_ctx": 4096, "keep_alive": "5m", "mirostat": 0, "return_token_ids": True, "top_k": -1, "anything": None,
}  # fmt: skip
"""Fields of other servers, and null where nobody knows a name."""
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "You are"}], "name": None, "tool_call_id": None},
    {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": None}]},
    {"role": "assistant", "content": "Hi.", "reasoning": "why", "id": "msg_1", "refusal": None, "tool_calls": None,
     "function_call": None, "audio": None, "annotations": []},
    *QUESTION,
]  # fmt: skip

Cases = Iterator[tuple[str, Callable[[], Any], int]]
"""A name, what to call, and the status it must be refused with; 0: it must be answered."""


def check(condition: bool, what: Any) -> None:
    if not condition:
        raise AssertionError(what)


def check_logprobs(entries: Any) -> None:
    """Of three alternatives each."""
    for entry in entries:
        check(-math.inf < entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 3, entry)
        check(bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"] or "\ufffd" in entry["token"], entry)
    check("".join(entry["token"] for entry in entries).startswith(ANSWER), entries)


def outcome(call: Callable[[], Any], refused: int) -> str:
    """What went wrong with a case; empty if nothing did."""
    try:
        call()
    except AssertionError as error:
        return f"wrong: {str(error)[:200]}"
    except Exception as error:
        status = getattr(error, "status_code", None)
        if status == refused and len(str(error)) > 20:
            return ""
        return f"{type(error).__name__} {status}: {str(error)[:200]}"
    return f"answered, expected a refusal with {refused}" if refused else ""


def openai_cases(url: str) -> Cases:
    import openai

    client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)

    def chat() -> None:
        done = client.chat.completions.create(**ASK, n=2)
        check([choice.index for choice in done.choices] == [0, 1], done)
        check(all(choice.message.content.startswith(ANSWER) for choice in done.choices), done)
        usage = done.usage
        check(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage)
        check(usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens, usage)

    def stream() -> None:
        chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        check(text == client.chat.completions.create(**ASK).choices[0].message.content, text)
        check(sum(choice.finish_reason is not None for chunk in chunks for choice in chunk.choices) == 1, chunks)
        check([chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True], chunks)

    def helper() -> None:
        with client.chat.completions.stream(**ASK) as events:
            check(events.get_final_completion().choices[0].message.content.startswith(ANSWER), "the stream helper")

    def logprobs() -> None:
        done = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3)
        check_logprobs([entry.model_dump() for entry in done.choices[0].logprobs.content])

    def models() -> None:
        check([model.id for model in client.models.list()] == ["bundled"], "the list")
        check(client.models.retrieve("bundled").object == "model", "the model")

    def completions() -> None:
        done = client.completions.create(**COMPLETE, echo=True, logprobs=2, n=2).choices
        found = done[0].logprobs
        check(len(done) == 2 and done[0].text.startswith(PROMPT), done)
        check(found.token_logprobs[0] is None and all(p <= 0 for p in found.token_logprobs[1:]), found)
        for token, offset in zip(found.tokens, found.text_offset):
            check(done[0].text.startswith(token, offset), (token, offset))
        parts = list(client.completions.create(**COMPLETE, stream=True))
        check(PROMPT + "".join(part.choices[0].text for part in parts) == done[0].text, parts)

    def harmless() -> None:
        asked: dict[str, Any] = ASK | PLAIN | {"extra_body": BESIDE}
        done = client.chat.completions.create(**asked).choices[0]
        check(done.message.content == client.chat.completions.create(**ASK).choices[0].message.content, done)
        stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        parts = [choice for chunk in stream for choice in chunk.choices]
        check("".join(part.delta.content or "" for part in parts) == done.message.content, parts)
        ids = [id_ for part in parts for id_ in (part.model_extra or {}).get("token_ids", [])]
        check(len(ids) > 10 and ids == (done.model_extra or {})["token_ids"], ids)
        check(client.chat.completions.create(**asked | {"messages": HISTORY}).choices[0].message.content, "a history")

    def harmless_completions() -> None:
        asked = {name: value for name, value in BESIDE.items() if name != "chat_template_kwargs"}
        done = client.completions.create(**COMPLETE, user="u", extra_body=asked | {"metadata": {}, "store": False})
        check(done.choices[0].text == client.completions.create(**COMPLETE).choices[0].text, done)

    def tools() -> None:
        asked: dict[str, Any] = ASK | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or ()
        check(call.function.name == "add" and json.loads(call.function.arguments).keys() == {"a"}, call)
        with client.chat.completions.stream(**asked) as stream:
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
        check(streamed.function.arguments == call.function.arguments, streamed)
        asked_for = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
        said = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        done = client.chat.completions.create(**ASK | {"messages": [*QUESTION, asked_for, said]}, tools=[TOOL])
        check(done.choices[0].finish_reason in ("stop", "length", "tool_calls"), done)

    def schema() -> None:
        text = client.chat.completions.create(**ASK, response_format=SCHEMA).choices[0].message.content
        check(json.loads(text).keys() == {"answer"}, text)

    def responses() -> None:
        ask: Any = {"model": "bundled", "input": QUESTION[0]["content"], "temperature": 0, "max_output_tokens": 80}
        text = client.responses.create(**ask).output_text
        check(text.startswith(ANSWER), text)
        events = list(client.responses.create(**ask, stream=True))
        check("".join(event.delta for event in events if event.type == "response.output_text.delta") == text, events)
        function = {"type": "function", "name": "add", "parameters": ADDED, "strict": True}
        tools: Any = {"tools": [function, {"type": "web_search"}], "tool_choice": "required"}
        (call, *_) = client.responses.create(**ask, **tools, parallel_tool_calls=False).output
        said = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        asked = [QUESTION[0], call.model_dump(), said]
        check(client.responses.create(**ask | {"input": asked}, tools=[function]).output, "an answer to a tool")

    yield from (("chat", chat, 0), ("stream", stream, 0), ("stream helper", helper, 0))
    yield from (("harmless fields", harmless, 0), ("harmless fields, completions", harmless_completions, 0))
    yield from (("logprobs", logprobs, 0), ("models", models, 0), ("completions", completions, 0))
    yield "tools", tools, 0
    yield "json_schema", schema, 0
    yield "embeddings", lambda: client.embeddings.create(model="bundled", input="x"), 404
    yield "responses", responses, 0
    yield "another model", lambda: client.chat.completions.create(**ASK | {"model": "other"}), 404
    yield "a bad value", lambda: client.chat.completions.create(**ASK | {"temperature": 3}), 400


def langchain_cases(url: str) -> Cases:
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    at: Any = {"base_url": url, "api_key": "unused", "model": "bundled", "max_retries": 0}
    chat = ChatOpenAI(**at, temperature=0, max_tokens=40)

    def invoke() -> None:
        done = chat.invoke(QUESTION[0]["content"])
        check(done.content.startswith(ANSWER), done)
        usage = done.usage_metadata
        check(usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], usage)
        check(usage["input_token_details"]["cache_read"] <= usage["input_tokens"], usage)

    def stream() -> None:
        whole = None
        for part in chat.stream(QUESTION[0]["content"], stream_usage=True):
            whole = part if whole is None else whole + part
        check(whole is not None and whole.content == chat.invoke(QUESTION[0]["content"]).content, whole)
        check(whole.usage_metadata["output_tokens"] > 0, whole)

    def logprobs() -> None:
        done = chat.bind(logprobs=True, top_logprobs=3).invoke(QUESTION[0]["content"])
        check_logprobs(done.response_metadata["logprobs"]["content"])

    def completions() -> None:
        complete = OpenAI(**at, temperature=0, max_tokens=8)
        check("".join(complete.stream(PROMPT)) == complete.invoke(PROMPT) != "", "stream and whole")

    def harmless() -> None:
        bound = ChatOpenAI(
            **at, temperature=0, max_tokens=40, reasoning_effort="low", verbosity="low", service_tier="auto",
            store=False, metadata={"a": "b"}, use_responses_api=False, extra_body=BESIDE, n=1, stream_usage=True,
        )  # fmt: skip
        check(bound.invoke(QUESTION[0]["content"]).content == chat.invoke(QUESTION[0]["content"]).content, "text")
        check("".join(part.content for part in bound.stream(QUESTION[0]["content"])).startswith(ANSWER[:20]), "stream")

    yield from (("chat", invoke, 0), ("stream", stream, 0), ("logprobs", logprobs, 0), ("completions", completions, 0))
    yield "harmless fields", harmless, 0
    yield "tools", lambda: chat.bind_tools([TOOL]).invoke("x"), 0

    def structured(method: str) -> None:
        longer = ChatOpenAI(**at, temperature=0, max_tokens=200)  # the model likes blanks
        found = longer.with_structured_output(ANSWERED | {"title": "x", "description": "x"}, method=method).invoke("x")
        check("answer" in found, found)

    yield "structured output, json_schema", lambda: structured("json_schema"), 0
    yield "structured output, function_calling", lambda: structured("function_calling"), 0
    embeddings = OpenAIEmbeddings(**at, check_embedding_ctx_length=False)
    yield "embeddings", lambda: embeddings.embed_query("x"), 404
    yield "responses", lambda: ChatOpenAI(**at, use_responses_api=True).invoke("x"), 0


def langchain_agent_cases(url: str) -> Cases:
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call
    from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    def model(**more: Any) -> Any:
        return ChatOpenAI(
            base_url=url, api_key="unused", model="bundled", max_retries=0, temperature=0, max_tokens=200, **more
        )

    def agent(**more: Any) -> tuple[Any, list[tuple[str, dict[str, Any]]]]:
        """Two tools, and what they were called with. The bundled model calls none of itself: it is made to call each
        once, and to answer then."""
        ran: list[tuple[str, dict[str, Any]]] = []

        def add(a: bool, n: Literal[1, 2]) -> str:
            """Adds."""
            ran.append(("add", {"a": a, "n": n}))
            return "3"

        def look(where: Literal["here", "there"]) -> str:
            """Looks."""
            ran.append(("look", {"where": where}))
            return "a \U0001f600"

        @wrap_model_call
        def choose(request: Any, handler: Any) -> Any:
            return handler(request.override(tool_choice=("add", "look", "none")[min(len(ran), 2)]))

        return create_agent(model(**more), [add, look], system_prompt="You are", middleware=[choose]), ran

    def check_turns(turns: list[Any], ran: list[tuple[str, dict[str, Any]]]) -> None:
        check([turn.type for turn in turns] == ["human", "ai", "tool", "ai", "tool", "ai"], turns)
        calls = [call for turn in turns[1::2] for call in turn.tool_calls]
        check([call["name"] for call in calls] == [name for name, _ in ran] == ["add", "look"], turns)
        # Neither schema forbids properties of other names.
        check(all(given.items() <= call["args"].items() for call, (_, given) in zip(calls, ran)), turns)
        check([call["id"] for call in calls] == [turn.tool_call_id for turn in turns[2::2]], turns)
        check([turn.content for turn in turns[2::2]] == ["3", "a \U0001f600"] and len(turns[-1].text) > 3, turns)

    def whole(**more: Any) -> None:
        asked, ran = agent(**more)
        check_turns(asked.invoke({"messages": QUESTION})["messages"], ran)

    def stream(**more: Any) -> None:
        asked, ran = agent(**more)
        parts, turns = [], []
        for mode, found in asked.stream({"messages": QUESTION}, stream_mode=["messages", "values"]):
            if mode == "values":
                turns = found["messages"]
            elif found[0].type == "AIMessageChunk":
                parts.append(found[0])
        check_turns(turns, ran)
        pieces = [piece for part in parts for piece in part.tool_call_chunks]
        check(len([piece for piece in pieces if piece["args"]]) > 2, "arguments come in parts")
        check("".join(part.text for part in parts if part.text).endswith(turns[-1].text), parts)

    class Answer(BaseModel):
        answer: bool

    def structured(strategy: Any) -> None:
        # Of itself the bundled model calls a tool again and again.
        asked = model(model_kwargs={"parallel_tool_calls": False})
        done = create_agent(asked, [], response_format=strategy(Answer)).invoke({"messages": QUESTION})
        check(isinstance(done["structured_response"], Answer), done)

    yield from (("agent with two tools", whole, 0), ("streamed", stream, 0))
    for strategy in (ProviderStrategy, ToolStrategy):
        yield strategy.__name__, lambda strategy=strategy: structured(strategy), 0
    yield "agent over responses", lambda: whole(use_responses_api=True), 0
    yield "streamed over responses", lambda: stream(use_responses_api=True), 0


def litellm_cases(url: str) -> Cases:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices over the network
    import litellm

    litellm.suppress_debug_info = True
    at: Any = {"api_base": url, "api_key": "unused", "num_retries": 0, "max_retries": 0}
    ask, complete = ASK | at | {"model": "openai/bundled"}, COMPLETE | at | {"model": "text-completion-openai/bundled"}

    def chat() -> None:
        done = litellm.completion(**ask)
        check(done.choices[0].message.content.startswith(ANSWER), done)
        check(done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens, done.usage)

    def stream() -> None:
        parts = [part.choices[0].delta.content or "" for part in litellm.completion(**ask, stream=True)]
        check("".join(parts) == litellm.completion(**ask).choices[0].message.content, parts)

    def logprobs() -> None:
        done = litellm.completion(**ask, logprobs=True, top_logprobs=3)
        check_logprobs(json.loads(json.dumps(done.choices[0].logprobs, default=lambda o: o.model_dump()))["content"])

    def completions() -> None:
        whole = litellm.text_completion(**complete).choices[0].text
        parts = [part.choices[0].text or "" for part in litellm.text_completion(**complete, stream=True)]
        check("".join(parts) == whole != "", parts)

    def harmless() -> None:
        passed = ["reasoning_effort", "verbosity", "store", "metadata", "prediction", "web_search_options"]
        asked: dict[str, Any] = ask | PLAIN | {"extra_body": BESIDE, "allowed_openai_params": passed}
        whole = litellm.completion(**ask).choices[0].message.content
        check(litellm.completion(**asked).choices[0].message.content == whole, whole)
        stream = litellm.completion(**asked, stream=True, stream_options={"include_usage": True})
        check("".join(part.choices[0].delta.content or "" for part in stream if part.choices) == whole, whole)
        check(litellm.completion(**asked | {"messages": HISTORY}).choices[0].message.content, "a history")
        check(litellm.text_completion(**complete, user="u").choices[0].text != "", "a completion")

    yield from (("chat", chat, 0), ("stream", stream, 0), ("logprobs", logprobs, 0), ("completions", completions, 0))
    yield "harmless fields", harmless, 0

    def tools() -> None:
        asked: dict[str, Any] = ask | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        done = litellm.completion(**asked).choices[0].message
        whole = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True))).choices[0].message
        (call,), (streamed,) = done.tool_calls, whole.tool_calls
        check(call.function.name == "add" and streamed.function.arguments == call.function.arguments, whole)
        said = {"role": "tool", "tool_call_id": call.id, "name": "add", "content": "3"}
        done = litellm.completion(**ask | {"messages": [*QUESTION, done, said]}, tools=[TOOL])
        check(len(done.choices[0].message.content) > 3, done)

    yield "tools", tools, 0
    yield "json_schema", lambda: litellm.completion(**ask, response_format=SCHEMA), 0
    yield "embeddings", lambda: litellm.embedding(model="openai/bundled", input="x", **at), 404
    yield "responses", lambda: litellm.responses(model="openai/bundled", input="x", **at), 0


def pydantic_ai_cases(url: str) -> Cases:
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("bundled", provider=OpenAIProvider(base_url=url, api_key="unused"))
    plain: Any = {"temperature": 0, "max_tokens": 80}
    more: Any = {"openai_reasoning_effort": "low", "openai_user": "u", "parallel_tool_calls": False, "seed": 1}
    more |= {"openai_service_tier": "auto", "openai_store": False, "extra_body": BESIDE}

    def chat() -> None:
        done = Agent(model, model_settings=plain).run_sync(QUESTION[0]["content"])
        check(done.output.startswith(ANSWER), done)
        again = Agent(model, model_settings=plain).run_sync("And json.loads?", message_history=done.all_messages())
        check(again.output, again)

    def stream() -> None:
        async def whole() -> str:
            async with Agent(model, model_settings=plain).run_stream(QUESTION[0]["content"]) as result:
                return "".join([part async for part in result.stream_text(delta=True)])

        check(asyncio.run(whole()).startswith(ANSWER), "a stream")

    def harmless() -> None:
        check(Agent(model, model_settings=plain | more).run_sync(QUESTION[0]["content"]).output.startswith(ANSWER), "")

    class Answer(BaseModel):
        answer: bool

    def output_type(asked: Any, kind: Any = Answer) -> None:
        done = Agent(asked, output_type=kind, model_settings={"temperature": 0, "max_tokens": 200}).run_sync("x")
        check(isinstance(done.output, Answer), done)

    responses = OpenAIResponsesModel("bundled", provider=OpenAIProvider(base_url=url, api_key="unused"))
    there = AnthropicProvider(base_url=url.removesuffix("/v1"), api_key="unused")
    messages = AnthropicModel("bundled", provider=there)
    yield from (("chat", chat, 0), ("stream", stream, 0), ("harmless fields", harmless, 0))
    for name, asked in (("chat", model), ("responses", responses), ("messages", messages)):
        yield f"output_type, {name}", lambda asked=asked: output_type(asked), 0
    for name, asked in (("chat", model), ("responses", responses)):
        yield f"NativeOutput, {name}", lambda asked=asked: output_type(asked, NativeOutput(Answer)), 0


def agents_cases(url: str) -> Cases:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI
    from openai.types.shared import Reasoning
    from pydantic import BaseModel

    set_tracing_disabled(True)

    class Answer(BaseModel):
        answer: bool

    def agent(**settings: Any) -> Any:
        model = OpenAIChatCompletionsModel("bundled", AsyncOpenAI(base_url=url, api_key="unused", max_retries=0))
        return Agent("a", model=model, model_settings=ModelSettings(temperature=0, max_tokens=80, **settings))

    def chat() -> None:
        check(Runner.run_sync(agent(), QUESTION[0]["content"]).final_output.startswith(ANSWER), "an answer")

    def stream() -> None:
        async def whole() -> Any:
            result = Runner.run_streamed(agent(), QUESTION[0]["content"])
            async for _ in result.stream_events():
                pass
            return result.final_output

        check(asyncio.run(whole()).startswith(ANSWER), "a stream")

    def harmless() -> None:
        asked = agent(
            reasoning=Reasoning(effort="low"), verbosity="low", metadata={"a": "b"}, store=False, include_usage=True,
            parallel_tool_calls=False, extra_body=BESIDE,
        )  # fmt: skip
        check(Runner.run_sync(asked, QUESTION[0]["content"]).final_output.startswith(ANSWER), "an answer")

    def responses(**more: Any) -> None:
        model = OpenAIResponsesModel("bundled", AsyncOpenAI(base_url=url, api_key="unused", max_retries=0))
        asked = Agent("a", model=model, model_settings=ModelSettings(temperature=0, max_tokens=200), **more)
        output = Runner.run_sync(asked, QUESTION[0]["content"]).final_output
        check(isinstance(output, more["output_type"]) if more else output.startswith(ANSWER), output)

    def tools() -> None:
        ran = []

        def look(where: Literal["here", "there"]) -> str:
            """Looks."""
            ran.append(where)
            return "3"

        asked = agent(tool_choice="required", parallel_tool_calls=False)  # of the first turn alone
        asked.tools = [function_tool(look)]
        items = [item.type for item in Runner.run_sync(asked, QUESTION[0]["content"]).new_items]
        check(items == ["tool_call_item", "tool_call_output_item", "message_output_item"] and len(ran) == 1, items)

    def handoff() -> None:
        asked = agent(tool_choice="required", parallel_tool_calls=False)
        asked.handoffs = [agent().clone(name="b")]
        check(Runner.run_sync(asked, QUESTION[0]["content"]).last_agent.name == "b", "the other agent")

    yield from (("chat", chat, 0), ("stream", stream, 0), ("harmless fields", harmless, 0))
    yield from (("tools", tools, 0), ("handoff", handoff, 0), ("responses", responses, 0))
    yield "output_type", lambda: responses(output_type=Answer), 0


def llama_index_cases(url: str) -> Cases:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike
    from pydantic import BaseModel

    at: Any = {"model": "bundled", "api_base": url, "api_key": "unused", "temperature": 0, "max_tokens": 80}
    at |= {"max_retries": 0, "context_window": 4096}
    llm, asked = OpenAILike(**at, is_chat_model=True), [ChatMessage(role="user", content=QUESTION[0]["content"])]

    def chat() -> None:
        check((llm.chat(asked).message.content or "").startswith(ANSWER), "an answer")

    def stream() -> None:
        check("".join(part.delta or "" for part in llm.stream_chat(asked)).startswith(ANSWER), "a stream")

    def completions() -> None:
        plain = OpenAILike(**at, is_chat_model=False)
        check(plain.complete(PROMPT).text == "".join(part.delta or "" for part in plain.stream_complete(PROMPT)), "")

    def harmless() -> None:
        more = {"user": "u", "metadata": {"a": "b"}, "parallel_tool_calls": False, "extra_body": BESIDE}
        done = OpenAILike(**at, is_chat_model=True, reasoning_effort="low", additional_kwargs=more).chat(asked)
        check((done.message.content or "").startswith(ANSWER), done)

    calling = OpenAILike(**at | {"max_tokens": 200}, is_chat_model=True, is_function_calling_model=True)

    def look(here: bool) -> str:
        """Looks."""
        return "3" if here else "4"

    def tools() -> None:
        tool = FunctionTool.from_defaults(look)
        done = calling.chat_with_tools([tool], chat_history=asked, tool_required=True)
        (call,) = calling.get_tool_calls_from_response(done)
        said = ChatMessage(role="tool", content="3", additional_kwargs={"tool_call_id": call.tool_id})
        answer = calling.chat_with_tools([tool], chat_history=[*asked, done.message, said]).message.content
        check(call.tool_name == "look" and len(answer or "") > 3, answer)

    class Answer(BaseModel):
        answer: bool

    def structured() -> None:
        done = calling.as_structured_llm(Answer).chat(asked)
        check(isinstance(done.raw, Answer), done)

    yield from (("chat", chat, 0), ("stream", stream, 0), ("completions", completions, 0))
    yield from (("harmless fields", harmless, 0), ("tools", tools, 0), ("as_structured_llm", structured, 0))


def instructor_cases(url: str) -> Cases:
    import instructor
    import openai
    from pydantic import BaseModel

    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="unused"), mode=instructor.Mode.MD_JSON)

    def chat() -> None:
        done = client.chat.completions.create(response_model=None, **ASK | PLAIN, extra_body=BESIDE)
        check(done.choices[0].message.content.startswith(ANSWER), done)

    class Answer(BaseModel):
        answer: bool

    def structured(mode: Any) -> None:
        asked = instructor.from_openai(openai.OpenAI(base_url=url, api_key="unused"), mode=mode)
        check(isinstance(asked.chat.completions.create(response_model=Answer, **ASK), Answer), mode)

    yield "harmless fields", chat, 0
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        yield f"structured output, {mode.value}", lambda mode=mode: structured(mode), 0


def dspy_cases(url: str) -> Cases:
    import dspy

    lm = dspy.LM("openai/bundled", api_base=url, api_key="unused", cache=False, temperature=0, max_tokens=80)

    def chat() -> None:
        check(str(lm(QUESTION[0]["content"])[0]).startswith(ANSWER), "an answer")

    def harmless() -> None:
        check(str(lm(QUESTION[0]["content"], user="u", n=1, extra_body=BESIDE)[0]).startswith(ANSWER), "an answer")

    def tools() -> None:
        (done,) = lm(QUESTION[0]["content"], tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
        (call,) = done["tool_calls"]
        check(call["function"]["name"] == "add" and json.loads(call["function"]["arguments"]).keys() == {"a"}, done)

    def schema() -> None:
        (text,) = lm(QUESTION[0]["content"], response_format=SCHEMA)
        check(json.loads(text).keys() == {"answer"}, text)

    def responses() -> None:
        asked = dspy.LM("openai/bundled", model_type="responses", api_base=url, api_key="unused", cache=False)
        check(asked(QUESTION[0]["content"], temperature=0)[0]["text"].startswith(ANSWER), "an answer")

    yield from (("chat", chat, 0), ("harmless fields", harmless, 0), ("tools", tools, 0), ("json_schema", schema, 0))
    yield "responses", responses, 0


def llm_cases(url: str) -> Cases:
    from llm.default_plugins.openai_models import Chat

    model: Any = Chat("bundled", model_name="bundled", api_base=url, key="unused")
    model.key = "unused"

    def chat(stream: bool) -> None:
        done = model.prompt(QUESTION[0]["content"], stream=stream, temperature=0, max_tokens=80)
        check(done.text().startswith(ANSWER), "an answer")

    def schema() -> None:
        structured = Chat("bundled", model_name="bundled", api_base=url, key="unused", supports_schema=True)
        structured.key = "unused"
        text = structured.prompt(QUESTION[0]["content"], schema=ANSWERED, stream=False, temperature=0).text()
        check(json.loads(text).keys() == {"answer"}, text)

    yield from (("chat", lambda: chat(False), 0), ("stream", lambda: chat(True), 0), ("schema", schema, 0))


def anthropic_cases(url: str) -> Cases:
    import anthropic

    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="unused", max_retries=0)
    ask: Any = {"model": "bundled", "max_tokens": 60, "messages": QUESTION, "extra_body": {"temperature": 0}}

    def messages() -> None:
        text = client.messages.create(**ask).content[0].text
        check(text.startswith(ANSWER), text)
        with client.messages.stream(**ask, system="") as stream:
            check("".join(stream.text_stream) == text, "a stream")

    def tools() -> None:
        asked: Any = ask | {"tools": [{"name": "add", "input_schema": ADDED}]}
        choice = {"type": "any", "disable_parallel_tool_use": True}
        (call,) = client.messages.create(**asked, tool_choice=choice).content
        check(call.name == "add" and call.input.keys() == {"a"}, call)
        turns = [
            *QUESTION,
            {"role": "assistant", "content": [call.model_dump(include={"type", "id", "name", "input"})]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "3"}]},
        ]
        check(client.messages.create(**asked | {"messages": turns}).usage.input_tokens > 0, "an answer to a tool")

    def count() -> None:
        counted = client.messages.count_tokens(model="bundled", messages=QUESTION).input_tokens
        usage = client.messages.create(**ask).usage
        check(counted == usage.input_tokens + usage.cache_read_input_tokens, counted)

    yield "models", lambda: check([model.id for model in client.models.list()] == ["bundled"], "the list"), 0
    yield from (("messages", messages, 0), ("tools", tools, 0), ("count_tokens", count, 0))


def ollama_cases(url: str) -> Cases:
    import ollama

    client = ollama.Client(host=url.removesuffix("/v1"))
    options = {"temperature": 0, "num_predict": 80}
    ask: Any = {"model": "bundled", "messages": QUESTION, "options": options}

    def chat() -> None:
        text = client.chat(**ask).message.content
        check(text.startswith(ANSWER), text)
        check("".join(part.message.content for part in client.chat(**ask, stream=True)) == text, "a stream")

    def generate() -> None:
        done = client.generate("bundled", QUESTION[0]["content"], options=options)
        check(done.response.startswith(ANSWER) and done.eval_count > 10, done)

    def structured() -> None:
        text = client.chat(**ask | {"options": {"temperature": 0}}, format=ANSWERED).message.content
        check(json.loads(text).keys() == {"answer"}, text)

    def models() -> None:
        check([model.model for model in client.list().models] == ["bundled"], "the list")
        check("completion" in client.show("bundled").capabilities, "the model")

    yield from (("models", models, 0), ("chat", chat, 0), ("generate", generate, 0), ("format", structured, 0))

    def tools() -> None:
        call = {"function": {"name": "add", "arguments": {"a": True}}}
        turns = [*QUESTION, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "3"}]
        for messages in (QUESTION, turns):
            done = client.chat(**ask | {"messages": messages}, tools=[TOOL])
            check(done.message.content or done.message.tool_calls, done)

    yield "tools", tools, 0
    yield "embeddings", lambda: client.embed("bundled", "x"), 404


CASES = {
    "openai": openai_cases,
    "langchain-openai": langchain_cases,
    "langchain": langchain_agent_cases,
    "litellm": litellm_cases,
    "llama-index-llms-openai-like": llama_index_cases,
    "pydantic-ai-slim": pydantic_ai_cases,
    "openai-agents": agents_cases,
    "instructor": instructor_cases,
    "dspy": dspy_cases,
    "llm": llm_cases,
    "anthropic": anthropic_cases,
    "ollama": ollama_cases,
}
"""By distribution."""
