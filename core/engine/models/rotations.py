"""What a model's rotations mean for the lengths of texts."""

from __future__ import annotations

from collections.abc import Iterator

from engine.contracts.graph import Graph
from engine.contracts.ops import Rope, RopeFacts


def why_no_longer(graph: Graph) -> str:
    """Why no text may have more tokens than ``graph`` has positions; empty where it has no more."""
    if not any(_rotations(graph, "dynamic")):
        return ""
    return (
        "with rope type 'dynamic' each token of a longer text changes how all keys before it are rotated, and keys in "
        "the cache stay as they are"
    )


def rotation_notes(graph: Graph, max_len: int) -> tuple[str, ...]:
    """What the user should know where texts of at most ``max_len`` tokens are served."""
    notes = [f"texts have at most {graph.max_position} tokens: {why}"] if (why := why_no_longer(graph)) else []
    trained = {int(rope.params["original_max_position_embeddings"]) for rope in _rotations(graph, "longrope")}
    notes += [
        f"rope type 'longrope': every text is rotated by the factors for more than {length} tokens, as model.max_len="
        f"{max_len} allows so many; transformers takes others for texts of up to {length} tokens. If none is longer, "
        f"set model.max_len={length}"
        for length in sorted(trained)
        if max_len > length
    ]
    return tuple(notes)


def _rotations(graph: Graph, kind: str) -> Iterator[RopeFacts]:
    ropes = (node.op.facts for node in graph.nodes if isinstance(node.op, Rope))
    return (facts for facts in ropes if facts.kind == kind)
