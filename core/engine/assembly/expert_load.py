"""The file of ``parallelism.expert_load``: what ``GET /engine/expert_load`` answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.models.expert_load import busiest_expert


class ExpertLoadFile(msgspec.Struct, frozen=True):
    """The JSON object, written and read."""

    layers: dict[int, tuple[Annotated[int, msgspec.Meta(ge=0)], ...]]
    """By number of a layer with experts, how many pairs of a token and an expert went to each of its experts."""
    busiest_over_mean: dict[int, float] = {}
    """By layer, for people: how often the busiest expert was chosen, over the mean."""


def expert_load_file(layers: Mapping[int, tuple[int, ...]]) -> ExpertLoadFile:
    """What is answered of these counts."""
    return ExpertLoadFile(dict(layers), {layer: round(busiest_expert(counts), 3) for layer, counts in layers.items()})


def with_expert_load(plan: EnginePlan) -> EnginePlan:
    """The plan with the counts of its ``parallelism.expert_load``, if there is one. Raises :class:`AssemblyError`."""
    file = plan.parallelism.expert_load
    return plan if file is None else replace(plan, expert_load=tuple(sorted(read_expert_load(file).items())))


def read_expert_load(file: str) -> Mapping[int, tuple[int, ...]]:
    """By layer. Raises :class:`AssemblyError` saying what is wrong with the file."""
    try:
        found = msgspec.json.decode(Path(file).read_bytes(), type=ExpertLoadFile).layers
        if not any(map(sum, found.values())):
            raise ValueError("no expert was chosen while it was measured")
    except OSError as error:
        raise AssemblyError([_problem(file, error.strerror or str(error))]) from error
    except ValueError as error:  # of msgspec, too
        raise AssemblyError([_problem(file, str(error))]) from error
    return found


def _problem(file: str, why: str) -> str:
    return (
        f"parallelism.expert_load={file}: {why}; expected the JSON that GET /engine/expert_load answers with "
        "(parallelism.count_experts=true)"
    )
