"""From ``GenerateRequest`` to what the server works on.

proto3 has no null: a number that is 0 where 0 makes no sense is one that was left out. Fields that are not known are
ignored, as protobuf does.
"""

from __future__ import annotations

from typing import Any

from grpc import StatusCode

from engine.grpc.errors import GrpcError, unimplemented
from engine.service.engines import EngineHandle
from engine.service.errors import bad_request
from engine.service.generate_request import GenerateOptions, generate_options
from engine.service.validation import too_long

NO_LIMIT = 2**31
"""``top_k`` from here on is -1 as an unsigned number, or another one that limits nothing."""
LARGEST = 2**31 - 1
MOST_BYTES = 256 * 1024
"""Of ``sampling_params``: what is in them is looked at here while nothing else happens."""
AS_THEY_ARE = ("min_p", "frequency_penalty", "presence_penalty", "ignore_eos", "include_stop_str_in_output")
WHERE_GIVEN = ("temperature", "seed", "logprobs", "prompt_logprobs")
"""Fields that know whether they were."""
UNSET_AT_ZERO = ("top_p", "repetition_penalty", "n")
STRUCTURED = {"json_schema": "json", "regex": "regex", "grammar": "grammar", "json_object": "json_object"}
"""Constraints, and what :class:`engine.service.protocol.StructuredOutputs` calls them."""


def options_of(request: Any, engine: EngineHandle) -> GenerateOptions:
    """What a ``GenerateRequest`` says beside its prompt. Raises :class:`ApiError`."""
    _refuse_others(request)
    params = request.sampling_params
    if (size := params.ByteSize()) > MOST_BYTES:
        raise bad_request(f"sampling_params has {size} bytes, expected at most {MOST_BYTES}.", "sampling_params")
    fields: dict[str, Any] = {name: getattr(params, name) for name in AS_THEY_ARE if getattr(params, name)}
    fields |= {name: getattr(params, name) for name in WHERE_GIVEN if params.HasField(name)}
    fields |= {name: getattr(params, name) for name in UNSET_AT_ZERO if getattr(params, name)}
    fields["skip_special_tokens"] = params.skip_special_tokens
    fields["stream"] = request.stream
    if 0 < params.top_k < NO_LIMIT:
        fields["top_k"] = params.top_k
    if params.HasField("max_tokens"):
        fields["max_tokens"] = min(params.max_tokens, LARGEST)
    if params.min_tokens:
        fields["min_tokens"] = min(params.min_tokens, LARGEST)
    if params.stop:
        fields["stop"] = list(params.stop)
    if params.stop_token_ids:
        fields["stop_token_ids"] = list(params.stop_token_ids)
    if params.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if (structured := _structured(params)) is not None:
        fields["structured_outputs"] = structured
    return generate_options(fields, engine)


def prompt_of(request: Any, engine: EngineHandle) -> str | tuple[int, ...]:
    """Text or token ids. Raises :class:`ApiError` ``invalid``."""
    match request.WhichOneof("input"):
        case "text":
            text: str = request.text
            return text
        case "tokenized":
            ids = request.tokenized.input_ids
            if len(ids) > engine.max_len:  # before they are objects
                raise too_long(str(len(ids)), engine.max_len, "prompt")
            return tuple(ids)
    raise bad_request("The request has no prompt; expected 'text' or 'tokenized'.", "input")


def _structured(params: Any) -> dict[str, Any] | None:
    """Raises :class:`ApiError`."""
    match params.WhichOneof("constraint"):
        case None:
            return None
        case "structural_tag":
            raise unimplemented("structural_tag is not supported; send json_schema, regex, grammar or choice.")
        case "choice":
            return {"choice": list(params.choice.choices)}
        case name:
            return {STRUCTURED[name]: getattr(params, name)}


def _refuse_others(request: Any) -> None:
    """Fields of the protocol that ask for what is not served here. Raises :class:`GrpcError`."""
    given = {field.name for field, _ in request.ListFields()}
    if images := given & {"mm_inputs", "extra_mm_inputs", "media_refs"}:
        raise bad_request(f"{min(images)}: this server computes text only, of models that see images, too.")
    if moved := given & {"kv_transfer_params", "kv_transfer_params_json"}:
        raise unimplemented(f"{min(moved)}: keys and values are not handed over between servers.")
    if "data_parallel_rank" in given and request.data_parallel_rank:
        words = "data_parallel_rank: the server's router chooses the engine; leave it out."
        raise GrpcError(StatusCode.INVALID_ARGUMENT, words, code="invalid_value")
    if request.sampling_params.HasField("truncate_prompt_tokens"):
        raise unimplemented("truncate_prompt_tokens is not supported; send the prompt as it should be.")
