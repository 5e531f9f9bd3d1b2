"""A request that brings a prompt, and wants token ids: what transports of typed messages make of theirs."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.service.engines import EngineHandle
from engine.service.job import Prompts
from engine.service.parsing import check_fan_out
from engine.service.prepare import encode_text
from engine.service.protocol import GenerationRequest, field_error
from engine.service.validation import check_bias_size, check_token_ids, too_long

NumLogprobs = Annotated[int, Meta(ge=0, le=20)]


class GenerateOptions(GenerationRequest, kw_only=True):
    """What it says beside its prompt. To routers it is a completion."""

    kind = "completion"
    id_prefix = "gen-"
    default_tokens = 2**31 - 1  # as many as there is room for
    fits_output = True

    logprobs: NumLogprobs | None = None
    """Alternatives for each output token; ``None``: no log probabilities."""
    prompt_logprobs: NumLogprobs | None = None
    """The same for each token of the prompt."""

    @property
    def echoes(self) -> bool:
        return self.prompt_logprobs is not None

    def num_logprobs(self) -> int | None:
        asked = [count for count in (self.logprobs, self.prompt_logprobs) if count is not None]
        return max(asked, default=None)


def generate_options(fields: dict[str, Any], engine: EngineHandle) -> GenerateOptions:
    """Checked types, ranges and number of sequences. Raises :class:`ApiError` ``invalid``."""
    try:
        options = msgspec.convert(fields, GenerateOptions)
    except msgspec.ValidationError as error:
        raise field_error(str(error)) from None
    check_fan_out(1, options.num_choices(), engine.limits)
    check_bias_size(options.logit_bias)
    return options


async def generate_prompts(engine: EngineHandle, client: str, prompt: str | tuple[int, ...]) -> Prompts:
    """Raises :class:`ApiError` ``invalid`` for text or ids that are no prompt of the model."""
    if isinstance(prompt, str):
        return Prompts((await encode_text(engine, client, prompt),))
    if len(prompt) > engine.max_len:
        raise too_long(str(len(prompt)), engine.max_len, "prompt")
    return Prompts((check_token_ids(prompt, engine.vocab_size),))
