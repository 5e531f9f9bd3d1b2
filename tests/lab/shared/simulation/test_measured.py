"""What the requests of a trace tell of the engine that served them."""

from dataclasses import replace

import pytest

from engine_lab.shared.simulation.measured import acceptance_of, mean_acceptance, overheads_of
from engine_lab.shared.simulation.trace import Measured, TraceRequest

MEASURED = Measured(30.0, 100.0, 1.0, 2.0, 0.5, 4.0, 20.0)


def request(drafted: int = 0, accepted: int = 0, chains: int = 0) -> TraceRequest:
    measured = replace(MEASURED, drafted_tokens=drafted, accepted_tokens=accepted, draft_chains=chains)
    return TraceRequest(0.0, 200, 50, measured=measured)


def test_overheads_are_those_of_the_requests() -> None:
    found = overheads_of([request()] * 20)
    assert found is not None
    assert (found.receive_ms, found.tokenize_us, found.deliver_ms) == pytest.approx((1.5, 10.0, 2.5))
    assert overheads_of([request(), TraceRequest(0.0, 200, 50)] * 20) is None


def test_acceptance_counts_drafts_whose_predecessors_were_accepted() -> None:
    """Chains of 3 at 0.5: 0.5 + 0.25 + 0.125 are accepted, of 3."""
    trace = [request(3000, 875, 1000), request(3000, 3000, 1000), request()]
    found = acceptance_of(trace)
    assert found[0] == pytest.approx(0.5, abs=0.01) and found[1] > 0.99
    assert found[2] == pytest.approx(mean_acceptance(trace)) and found[0] < found[2] < found[1]
    assert acceptance_of([request(3, 1, 1)] * 2) == {}
