"""``/v1/messages/count_tokens``"""

from __future__ import annotations

from ...service.fakes import MODEL, in_loop
from ..fakes import running
from ..test_messages_format import ASK, FUNCTIONS, HI, api
from ..test_tool_calls import with_tools


@in_loop
async def test_tokens_are_counted_as_the_prompt_has_them() -> None:
    async with running() as server, api(with_tools(server)) as client:
        counted = [
            (await client.messages.count_tokens(model=MODEL, messages=HI, system="Be.", tools=tools)).input_tokens
            for tools in ([], FUNCTIONS)
        ]
        await client.messages.create(**ASK, system="Be.")
        await client.messages.create(**ASK, system="Be.", tools=FUNCTIONS)
        assert counted == [len(request.prompt) for request in server.client.requests]
