"""``GET /tokenizer_info``: what a client needs to render and cut prompts by itself."""

from __future__ import annotations

from aiohttp import web

from engine.http.bodies import json_response
from engine.http.incoming import state_of


async def tokenizer_info(http: web.Request) -> web.StreamResponse:
    """The chat template and the special tokens that it names, null where the model has none; ``model_max_length`` in
    tokens."""
    state = state_of(http)
    template = state.engine.tokenizer.template
    named = {} if template is None else {name: token or None for name, token in template.source.variables.items()}
    ends = state.engine.plan.model.eos_token_ids
    of_model = {"bos_token": None, "pad_token": None, "eos_token": state.engine.decode(ends[:1]) if ends else None}
    info = {
        "model_max_length": state.engine.max_len,
        "vocab_size": state.engine.tokenizer.vocab_size,
        "chat_template": None if template is None else template.source.text,
    }
    return json_response(info | of_model | {name: token for name, token in named.items() if token is not None})
