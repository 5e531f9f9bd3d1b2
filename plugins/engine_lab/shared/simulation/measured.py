"""What the requests of a trace tell of the engine that served them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, quantiles

from engine_lab.shared.simulation.spec import Overheads
from engine_lab.shared.simulation.trace import Measured, TraceRequest

LEAST_CHAINS = 20
"""Of a trace, for its acceptance to count."""
PRIOR_CHAINS = 2.0
"""A request's acceptance counts as if it had so many more chains, accepted as those of all requests are."""
HALVINGS = 20


def overheads_of(trace: Sequence[TraceRequest]) -> Overheads | None:
    """Of the API process; ``None``: the trace does not say, or not of every request."""
    found = [request.measured for request in trace if request.measured is not None]
    if len(found) < max(2, len(trace)):
        return None
    way_ms = quantiles([each.dispatch_ms for each in found], n=10)[0]  # of those that hit no running step
    tokens = sum(request.prompt_tokens for request in trace)
    return Overheads(
        receive_ms=fmean(each.receive_ms for each in found) + way_ms,
        tokenize_us=sum(each.tokenize_ms for each in found) * 1e3 / tokens,
        deliver_ms=fmean(each.deliver_ms for each in found),
    )


def acceptance_of(trace: Sequence[TraceRequest]) -> Mapping[int, float]:
    """Chance that a draft is accepted, given that those before it were, by the request's place in the trace; empty: too
    few drafts were verified to say."""
    found = {which: request.measured for which, request in enumerate(trace) if request.measured is not None}
    if sum(each.draft_chains for each in found.values()) < LEAST_CHAINS:
        return {}
    usual = _acceptance(found.values())
    return {which: _acceptance([each], usual) for which, each in found.items()}


def mean_acceptance(trace: Sequence[TraceRequest]) -> float:
    """Of all drafts of the trace."""
    return _acceptance([request.measured for request in trace if request.measured is not None])


def _acceptance(measured: Iterable[Measured], usual: float | None = None) -> float:
    """The chance with which chains of the mean length would be accepted as far as these were on average. Drafts after a
    rejected one count for nothing."""
    chains = accepted = drafted = 0.0
    for each in measured:
        chains += each.draft_chains
        accepted += each.accepted_tokens
        drafted += each.drafted_tokens
    if not chains:
        return usual or 0.0
    length = drafted / chains
    if usual is not None:
        accepted += PRIOR_CHAINS * _accepted(usual, length)
        chains += PRIOR_CHAINS
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _accepted(middle, length) < accepted / chains else (low, middle)
    return (low + high) / 2.0


def _accepted(chance: float, length: float) -> float:
    """Drafts of a chain that are accepted on average."""
    return length if chance >= 1.0 else chance * (1.0 - chance**length) / (1.0 - chance)
