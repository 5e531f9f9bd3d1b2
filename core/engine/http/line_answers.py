"""A line of a batch is answered as a request is that comes by itself: the same reading, preparing, routing, writing."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import structlog

from engine.contracts.router import ToUrl
from engine.http.answering import whole
from engine.http.endpoints import CHAT, COMPLETIONS, RESPONSES, Endpoint
from engine.http.errors import error_body, status_of
from engine.http.state import ServerState
from engine.service.batches.lines import Answered
from engine.service.batches.records import Batch
from engine.service.batches.runner import Grow
from engine.service.errors import ApiError, bad_request
from engine.service.keys import Caller
from engine.service.parsing import ParsedResponses
from engine.service.prepare import checked_shape, make_job
from engine.service.promises import promise
from engine.service.timings import Arrival

BATCHED: tuple[Endpoint[Any], ...] = (CHAT, COMPLETIONS, RESPONSES)
"""The endpoints that a batch may have."""
LAST = 2**31 - 1
"""The least urgent priority that there is."""

log = structlog.get_logger("engine.batches")


class LineAnswers:
    """An :data:`~engine.service.batches.runner.Answer`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._endpoints = {endpoint.path: endpoint for endpoint in BATCHED}

    async def __call__(self, batch: Batch, body: bytes, grow: Grow) -> Answered:
        try:
            return await self._answer(batch, body, grow)
        except ApiError as error:
            if error.kind in ("unavailable", "overloaded"):
                raise
            return Answered(status_of(error), "", error_body(error))
        except Exception as error:
            log.error("line failed", error=type(error).__name__, batch=batch.id)
            failed = ApiError("failed", "The server failed on this request.", code="internal_error")
            return Answered(500, "", error_body(failed))

    async def _answer(self, batch: Batch, body: bytes, grow: Grow) -> Answered:
        received_s = time.monotonic()
        state, endpoint = self._state, self._endpoints[batch.endpoint]
        engine, client = state.engine, f"batch:{batch.tenant}"
        parsed = await state.body_parser.parse(endpoint.request, body, engine.limits, client)
        parsed_s = time.monotonic()
        options = parsed.options
        if options.stream:
            raise bad_request("A line of a batch cannot be streamed; leave out 'stream'.", "stream")
        if isinstance(parsed, ParsedResponses) and (options.previous_response_id or parsed.references):
            message = "A line of a batch cannot go on from a stored response; send the whole conversation as 'input'."
            raise bad_request(message, "previous_response_id" if options.previous_response_id else "input")
        changed = {"priority": LAST} | ({"store": False} if isinstance(parsed, ParsedResponses) else {})
        options = msgspec.structs.replace(options, **changed)
        sequences = parsed.num_prompts * options.num_choices()
        if batch.max_sequences is not None and sequences > batch.max_sequences:
            message = f"The line has {sequences} sequences; its key's tenant may have {batch.max_sequences} at a time."
            raise bad_request(message, code="key_limit")
        await grow(sequences)
        prompts = await endpoint.prompts(engine, client, parsed)
        shape = await checked_shape(engine, options)
        arrival = Arrival(received_s, (parsed_s - received_s) * 1e3, (time.monotonic() - parsed_s) * 1e3)
        caller = Caller(batch.tenant, sha256="") if batch.tenant else None
        promised = promise(state.slo, None, None)
        patient = None if promised is None else promised.patient()
        job = make_job(engine, options, prompts, client, arrival, shape, caller, patient)
        await state.scaler.until_up()
        route = state.dispatcher.place(job.api)
        if isinstance(route, ToUrl):
            raise bad_request("The router sends this request to another server, where lines of batches do not go.")
        async with state.dispatcher.generate(job, route) as generation:
            data = await whole(job, generation, endpoint.format(job, engine.tokenizer, generation))
        return Answered(200, job.api.request_id, data)
