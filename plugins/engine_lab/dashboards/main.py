"""Entry of ``engine dashboards``."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.contracts.command import OK, USAGE
from engine_lab.dashboards.boards import DASHBOARDS
from engine_lab.shared.errors import complain


def run(folder: str) -> int:
    """Write each as ``UID.json``, and say so."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for board in DASHBOARDS:
            file = Path(folder) / f"{board.uid}.json"
            file.write_bytes(msgspec.json.format(msgspec.json.encode(board.plain()), indent=2) + b"\n")
            print(file)
    except OSError as error:
        return complain("dashboards", f"--to {folder}: expected a folder to write to ({error})", USAGE)
    return OK
