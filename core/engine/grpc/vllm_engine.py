"""``vllm.grpc.engine.VllmEngine``: its methods, one record each. The messages are those of ``smg-grpc-proto``."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engine.grpc.calls import Call, Calls, Method, owner_of
from engine.grpc.errors import unimplemented
from engine.grpc.generating import generate
from engine.grpc.tokenizer_files import archive, pieces
from engine.service.engines import EngineHandle

NAME = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name


class VllmEngine:
    """Serves it. What is not served says so by ``UNIMPLEMENTED``."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._begun_s = time.monotonic()
        self._archive: tuple[bytes, str] | None = None
        self._archiving = asyncio.Lock()

    def methods(self) -> tuple[Method, ...]:
        return (
            Method("Generate", pb.GenerateRequest, generate),
            Method("Abort", pb.AbortRequest, self._abort),
            Method("HealthCheck", pb.HealthCheckRequest, _health_check, "open", is_probe=True),
            Method("GetModelInfo", pb.GetModelInfoRequest, _model_info),
            Method("GetServerInfo", pb.GetServerInfoRequest, self._server_info, "admin"),
            Method("GetLoads", pb.GetLoadsRequest, _loads, "admin", is_probe=True),
            Method("GetTokenizer", common.GetTokenizerRequest, self._tokenizer),
            Method("Embed", pb.EmbedRequest, _not_served),
            Method("FlushCache", common.FlushCacheRequest, _not_served),
            Method("StartProfile", common.StartProfileRequest, _not_served),
            Method("StopProfile", common.StopProfileRequest, _not_served),
            Method("SubscribeKvEvents", common.SubscribeKvEventsRequest, _not_served),
        )

    async def _abort(self, call: Call) -> None:
        """End requests of the same key by the names that the client gave them; others are ignored, they may have
        ended meanwhile."""
        names = set((await call.read()).request_ids)
        self._calls.abort(owner_of(call.caller), names - {""})
        await call.write(pb.AbortResponse())

    async def _server_info(self, call: Call) -> None:
        await call.read()
        backend = call.backend
        plan = backend.engine.plan
        info = pb.GetServerInfoResponse(
            active_requests=backend.admission.in_flight,
            is_paused=backend.not_ready() is not None,
            uptime_seconds=time.monotonic() - self._begun_s,
            server_type="engine-grpc",
            data_parallel_size=1,
            block_size=plan.block_size,
            model_dtype=plan.dtype,
            max_num_seqs=plan.scheduler.max_requests * len(backend.engines),
            constrained_decoding_start="first_token",
        )
        await call.write(info)

    async def _tokenizer(self, call: Call) -> None:
        await call.read()
        async with self._archiving:
            if self._archive is None:
                try:
                    self._archive = await asyncio.to_thread(archive, call.backend.engine.plan.model.path)
                except OSError as error:
                    raise unimplemented(f"The tokenizer cannot be sent: {error.strerror or error}.") from None
        for data, digest in pieces(*self._archive):
            await call.write(common.GetTokenizerChunk(data=data, sha256=digest))


async def _health_check(call: Call) -> None:
    await call.read()
    why_not = call.backend.not_ready()
    await call.write(pb.HealthCheckResponse(healthy=why_not is None, message=why_not or "ready"))


async def _model_info(call: Call) -> None:
    await call.read()
    await call.write(model_info(call.backend.engine))


def model_info(engine: EngineHandle) -> Any:
    """A ``GetModelInfoResponse``."""
    model = engine.plan.model
    return pb.GetModelInfoResponse(
        model_path=model.path,
        tokenizer_path=model.path,
        served_model_name=model.name,
        is_generation=True,
        max_context_length=engine.max_len,
        max_req_input_len=engine.max_len - 1,
        vocab_size=engine.vocab_size,
        model_type=str(model.raw.get("model_type", "")),
        architectures=[model.architecture],
        eos_token_ids=model.eos_token_ids,
        bos_token_id=model.bos_token_id or 0,
        pad_token_id=_first_int(model.raw.get("pad_token_id")),
    )


async def _loads(call: Call) -> None:
    """An entry for each engine."""
    await call.read()
    engines = list(call.backend.engines.values())
    answer = pb.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(),
        dp_rank_count=len(engines),
        loads=[_load(rank, engine) for rank, engine in enumerate(engines)],
    )
    await call.write(answer)


def _load(rank: int, engine: EngineHandle) -> Any:
    stats, load, info = engine.client.stats, engine.load, engine.client.info
    tokens = info.kv_tokens if info is not None else 0
    return pb.SchedulerLoad(
        dp_rank=rank,
        num_running_reqs=stats.running,
        num_waiting_reqs=max(0, load.sequences - stats.running),
        num_total_reqs=load.sequences,
        num_used_tokens=round(tokens * stats.kv_used),
        max_total_num_tokens=tokens,
        token_usage=stats.kv_used,
        max_running_requests=engine.plan.scheduler.max_requests,
        num_waiting_uncached_tokens=load.queued_tokens,
    )


async def _not_served(call: Call) -> None:
    await call.read()
    raise unimplemented("This server does not serve this method.")


def _first_int(value: Any) -> int:
    return value if isinstance(value, int) else 0
