"""What a quantizer says the checkpoint has of a linear layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.quantizer import UNQUANTIZED, CheckingQuantizer, Quantizer, StoredHeader, StoredTensor
from engine.plugin_guard.calls import contract_error, quote


def stored_of(quantizer: Quantizer | None, spec: LinearSpec) -> Sequence[StoredTensor]:
    """What a quantizer says each part of a layer has in the checkpoint; ``None``: weights are stored as they are."""
    if quantizer is None:
        return UNQUANTIZED
    found = quantizer.stored(spec)
    if not isinstance(found, tuple | list) or not all(isinstance(each, StoredTensor) for each in found):
        raise contract_error(quantizer, "stored", f"returned {quote(found)}, expected a list of StoredTensor")
    return found


def is_stored(stored: StoredTensor, part: LinearPart) -> bool:
    """Whether this part has such a tensor: a bias only where the architecture says so, or the format allows it."""
    return stored.suffix != "bias" or part.bias or stored.extra


def quantizer_problems(
    quantizer: CheckingQuantizer, specs: Sequence[LinearSpec], headers: Mapping[str, StoredHeader]
) -> Sequence[str]:
    """What a quantizer says of layers."""
    problems = quantizer.problems(specs, headers)
    if isinstance(problems, str) or not all(isinstance(problem, str) for problem in problems):
        raise contract_error(quantizer, "problems", f"returned {quote(problems)}, expected a list of texts")
    return problems
