"""Where the checkpoint of a drafter is. Free of torch."""

from __future__ import annotations

from pathlib import Path

from engine.contracts.model import ModelFacts
from engine.contracts.provider import BuildContext

AUTO = "auto"


def shipped_folder(name: str, model: ModelFacts) -> Path:
    """Where a model directory keeps its own head of this kind."""
    return Path(model.path) / "drafters" / name


def not_shipped(name: str, path: str, model: ModelFacts) -> tuple[str, ...]:
    """Why ``drafter.path=auto`` finds nothing; empty: it does, or another path is given."""
    folder = shipped_folder(name, model)
    if path != AUTO or (folder / "config.json").is_file():
        return ()
    return (f"{model.name} comes without one ({folder} is not there); set drafter.path to a directory or hub id",)


def find_checkpoint(name: str, path: str, context: BuildContext) -> str:
    """The directory of ``drafter.path``. Raises ``ValueError`` saying what would help."""
    problems = not_shipped(name, path, context.model)
    if problems:
        raise ValueError(f"drafter.path=auto: {problems[0]}")
    return str(shipped_folder(name, context.model) if path == AUTO else context.find_model(path))
