"""How long a start takes with empty caches, and how long the second one takes, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_check.section import Context, Row
from gpu_check.shapes import folder_of

LEAST_RATIO = 3.0
"""What "several times faster" is taken to mean."""


def run(context: Context) -> None:
    caches = context.scratch / "caches"
    folders = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "XDG_CACHE_HOME": "home"}
    environment = os.environ | {name: str(caches / folder) for name, folder in folders.items()}
    folder = folder_of("1b", context.scratch)
    first = started(folder, context.device, environment)
    context.emit(Row("1b: first start, empty caches", first["seconds"], "s", detail=first))
    second = started(folder, context.device, environment)
    context.emit(Row("1b: second start", second["seconds"], "s", detail=second))
    phases = {name: [first["phases"].get(name), took] for name, took in second["phases"].items()}
    ratio = first["built_s"] / second["built_s"]
    promised = not context.dry_run
    context.emit(
        Row("1b: engine built, first / second start", round(ratio, 2), "x", is_check=False, detail=phases,
            target=f">= {LEAST_RATIO:g} x" if promised else "", held=ratio >= LEAST_RATIO if promised else None)
    )  # fmt: skip


def started(folder: Path, device: str, environment: dict[str, str]) -> dict[str, Any]:
    """One start up to the first token. Raises ``RuntimeError`` with the end of what it said."""
    began = time.monotonic()
    command = [sys.executable, "-m", "gpu_check.start", str(folder), device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the engine did not start: {done.stderr[-600:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"seconds": round(time.monotonic() - began, 2), **found}


def main(folder: str, device: str) -> None:
    """In a process of its own: build, one token, say what took how long."""
    from gpu_check.engine_run import EngineRun

    run = EngineRun(folder, device, ["model.max_len=512" if device == "cpu" else "model.max_len=4096"])
    first_token_ms = run.first_token_ms(16)
    phases = {phase.name: phase.seconds for phase in run.info.phases}
    run.close()
    print(json.dumps({"built_s": round(run.build_s, 3), "first_token_ms": round(first_token_ms, 2), "phases": phases}))


if __name__ == "__main__":
    main(*sys.argv[1:])
