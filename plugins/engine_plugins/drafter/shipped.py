"""Where the checkpoint of a drafter is."""

from __future__ import annotations

from pathlib import Path

from engine.contracts.provider import BuildContext

AUTO = "auto"


def find_checkpoint(name: str, path: str, context: BuildContext) -> str:
    """The directory of ``drafter.path``; ``auto``: the one in the model's own, ``drafters/NAME``.

    Raises ``ValueError`` saying what would help.
    """
    if path != AUTO:
        return str(context.find_model(path))
    folder = Path(context.model.path) / "drafters" / name
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"drafter.path=auto: {context.model.name} comes without a {name} drafter ({folder} has none); set "
            "drafter.path to a directory or hub id, or take drafter=ngram, which needs none"
        )
    return str(folder)
