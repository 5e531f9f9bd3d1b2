"""What transports beside HTTP are given: ``engine.service.transport``."""

from __future__ import annotations

from ..http.fakes import running
from .fakes import in_loop


class Quiet:
    """A transport of no requests."""

    address = "nowhere"

    def __init__(self) -> None:
        self.stopped_s: list[float] = []

    async def stop(self, grace_s: float) -> None:
        self.stopped_s.append(grace_s)


@in_loop
async def test_a_transport_is_opened_over_the_server_s_own_parts_and_stopped_with_it() -> None:
    quiet, given = Quiet(), []

    async def listen(backend: object) -> Quiet:
        given.append(backend)
        return quiet

    async with running(beside=[listen]) as server:
        assert given == [server.server.state] and server.server.transports == [quiet]
        assert quiet.stopped_s == []
    assert len(quiet.stopped_s) == 1
