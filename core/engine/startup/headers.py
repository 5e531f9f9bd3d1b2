"""What headers tell of a model's weights, for commands that load none."""

from __future__ import annotations

from engine.assembly.bind import build_context, build_slots, describe_model
from engine.assembly.errors import AssemblyError
from engine.assembly.plan import EnginePlan
from engine.checkpoint.files import CheckpointError
from engine.models.checkpoint_checks import checked_checkpoint, checkpoint_notes
from engine.models.rotations import rotation_notes


def check_tensors(plan: EnginePlan) -> tuple[str, ...]:
    """Look at the weights as an engine does before it reads any. Returns what the user should know of how they are
    used. Builds the plugins that say which tensors there must be, and imports torch as these do.

    Raises :class:`AssemblyError` for weights that the engine refuses.
    """
    (quantizer,) = build_slots(plan, ("quantizer",), build_context(plan))["quantizer"]
    try:
        graph = describe_model(plan).graph
        checkpoint = checked_checkpoint(graph, quantizer, plan.model.path)
    except CheckpointError as error:
        raise AssemblyError([str(error)]) from error
    return (*checkpoint_notes(graph, checkpoint), *rotation_notes(graph, plan.max_len))
