"""What a quantizer says the checkpoint has of a linear layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.quantizer import CheckingQuantizer, Quantizer, StoredHeader, StoredTensor
from engine.plugin_guard.calls import contract_error, quote


def linear_names(spec: LinearSpec, quantizer: Quantizer) -> tuple[set[str], set[str]]:
    """The tensors a linear layer must have, and those it may have."""
    required: set[str] = set()
    optional: set[str] = set()
    for stored in stored_of(quantizer, spec):
        for part in spec.parts:
            if is_stored(stored, part):
                is_required = part.bias if stored.suffix == "bias" else not stored.optional
                (required if is_required else optional).add(f"{part.name}.{stored.suffix}")
    return required, optional


def stored_of(quantizer: Quantizer, spec: LinearSpec) -> Sequence[StoredTensor]:
    """What a quantizer says each part of a layer has in the checkpoint."""
    found = quantizer.stored(spec)
    if not isinstance(found, tuple | list) or not all(isinstance(each, StoredTensor) for each in found):
        raise contract_error(quantizer, "stored", f"returned {quote(found)}, expected a list of StoredTensor")
    return found


def is_stored(stored: StoredTensor, part: LinearPart) -> bool:
    """Whether this part has such a tensor: a bias only where the architecture says so, or the format allows it."""
    return stored.suffix != "bias" or part.bias or stored.extra


def plain_shape(part: LinearPart, spec: LinearSpec, stored: StoredTensor) -> tuple[int, ...] | None:
    """The shape an unquantized tensor must have; quantizers judge their own."""
    if stored.suffix == "bias":
        return (part.out_features,)
    is_plain = stored.suffix == "weight" and all(count == 1 for count in stored.per_entry.values())
    return (part.out_features, spec.in_features) if is_plain else None


def quantizer_problems(
    quantizer: CheckingQuantizer, specs: Sequence[LinearSpec], headers: Mapping[str, StoredHeader]
) -> Sequence[str]:
    """What a quantizer says of layers."""
    problems = quantizer.problems(specs, headers)
    if isinstance(problems, str) or not all(isinstance(problem, str) for problem in problems):
        raise contract_error(quantizer, "problems", f"returned {quote(problems)}, expected a list of texts")
    return problems
