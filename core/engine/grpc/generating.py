"""The way of a ``Generate`` call: prepare, route, and deliver whole or as a stream."""

from __future__ import annotations

import time

from engine.contracts.router import ToUrl
from engine.grpc.calls import Call
from engine.grpc.errors import unimplemented
from engine.grpc.requests import options_of, prompt_of
from engine.grpc.responses import GenerateFormat
from engine.service.generate_request import generate_prompts
from engine.service.output import Delta, joined
from engine.service.prepare import checked_shape, make_job
from engine.service.promises import HEADER, promise
from engine.service.timings import Arrival
from engine.service.trace_context import trace_context


async def generate(call: Call) -> None:
    """Serve a ``GenerateRequest``. Raises :class:`ApiError`. However it ends, nothing runs on for nobody: the block
    of ``dispatcher.generate`` ends what is left, whether grpc cancels the call of a client that is gone or a write to
    it fails."""
    backend = call.backend
    promised = promise(backend.slo, call.caller, next(iter(call.metadata(HEADER.lower())), None))
    call.slo_class = "" if promised is None else promised.name
    backend.admission.gate(call.client, call.slo_class)
    engine = backend.engine
    request = await call.read()
    call.request_id = request.request_id
    options = options_of(request, engine)
    parsed_s = time.monotonic()
    most = None if call.caller is None else call.caller.max_sequences
    with backend.admission.enter(call.client, options.num_choices(), most, call.slo_class) as call.flight:
        prompts = await generate_prompts(engine, call.client, prompt_of(request, engine))
        del request  # a long prompt is held once
        shape = await checked_shape(engine, options)
        receive_ms, tokenize_ms = (parsed_s - call.received_s) * 1e3, (time.monotonic() - parsed_s) * 1e3
        trace = trace_context(call.metadata("traceparent"), call.metadata("tracestate"))
        arrival = Arrival(call.received_s, receive_ms, tokenize_ms, trace)
        job = make_job(engine, options, prompts, call.client, arrival, shape, call.caller, promised)
        await backend.scaler.until_up()
        route = backend.dispatcher.place(job.api)
        if isinstance(route, ToUrl):
            raise unimplemented("The router sends this request to a server of HTTP; ask for it over HTTP.")
        async with backend.dispatcher.generate(job, route, lambda: call.written) as generation:
            form = GenerateFormat(job, options, generation)
            if options.stream:
                async for delta in generation:
                    for message in form.messages(delta):
                        await call.write(message)
                return
            collected: list[list[Delta]] = [[] for _ in range(job.num_sequences)]
            async for delta in generation:
                collected[delta.index].append(delta)
            for each in collected:
                await call.write(form.whole(joined(each)))
