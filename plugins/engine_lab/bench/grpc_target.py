"""The same requests over gRPC (``vllm.grpc.engine.VllmEngine``): prompts and token ids, no chats."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

from engine_lab.bench.record import RequestRecord
from engine_lab.bench.stream import Clock, StreamResult
from engine_lab.bench.target import Send, Target, record_of
from engine_lab.bench.workload import BenchRequest

METHOD = "/vllm.grpc.engine.VllmEngine/Generate"


@asynccontextmanager
async def grpc_sender(address: str, target: Target, clock: Clock, timeout_s: float) -> AsyncIterator[Send]:
    """What sends over one connection to ``address``: ``HOST:PORT`` or ``unix:PATH``. Raises ``ValueError`` where the
    extra is not installed."""
    if any(find_spec(name) is None for name in ("grpc", "smg_grpc_proto")):
        raise ValueError("--grpc needs the extra grpc: pip install 'engine[grpc]'")
    import grpc

    async with grpc.aio.insecure_channel(address) as channel:
        yield GrpcSender(channel, target, clock, timeout_s)


class GrpcSender:
    """A :class:`Send`."""

    def __init__(self, channel: Any, target: Target, clock: Clock, timeout_s: float) -> None:
        from smg_grpc_proto.generated import vllm_engine_pb2 as pb

        self._pb: Any = pb
        self._target, self._clock, self._timeout_s = target, clock, timeout_s
        self._call = channel.unary_stream(
            METHOD,
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateResponse.FromString,
        )

    async def __call__(self, request: BenchRequest, scheduled_s: float) -> RequestRecord:
        import grpc

        message, sent_s, result = self.message(request), self._clock(), StreamResult()
        key = self._target.api_key
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        try:
            async for answer in self._call(message, timeout=self._timeout_s, metadata=metadata):
                take(result, answer, self._clock())
        except grpc.aio.AioRpcError as error:
            result.error, result.detail = f"grpc_{error.code().name.lower()}", (error.details() or "")[:300]
        return record_of(request, scheduled_s, sent_s, self._clock(), result, keep_text=False)

    def message(self, request: BenchRequest) -> Any:
        """The request as a ``GenerateRequest``."""
        target, pb = self._target, self._pb
        params = pb.SamplingParams(
            temperature=target.temperature, max_tokens=request.max_tokens, ignore_eos=target.ignore_eos
        )
        asked = pb.GenerateRequest(sampling_params=params, stream=target.stream)
        prompt = request.whole
        if isinstance(prompt, str):
            asked.text = prompt
        else:
            asked.tokenized.input_ids.extend(prompt)
        return asked


def take(result: StreamResult, answer: Any, now: float) -> None:
    """Note an answer that came at ``now``: a chunk of a stream, or its end."""
    if answer.WhichOneof("response") == "chunk":
        result.output_tokens = (result.output_tokens or 0) + len(answer.chunk.token_ids)
        result.chunks_s.append(now)
        result.chunk_tokens.append(result.output_tokens)
    else:
        complete = answer.complete
        result.finish_reason = complete.finish_reason
        result.prompt_tokens, result.output_tokens = complete.prompt_tokens, complete.completion_tokens
        result.cached_tokens = complete.cached_tokens
    result.end_s = now
