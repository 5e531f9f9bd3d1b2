"""The quality of every quantizer with every KV format, on the bundled model: calibrate, write checkpoints, evaluate.

    python -m tools.quantize.table /tmp/quality          # checkpoints, quality.json and quality.md go there

Takes about a quarter of an hour on two cores. Text and questions are those of ``engine eval`` for the bundled model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import tools.quantize.__main__ as quantizing
from tokenizers import Tokenizer
from tools.quantize.texts import BUNDLED, write_calibration

from engine.cli.main import main as engine

WRITTEN = {
    "rtn with zeros": ("--method", "rtn", "--asymmetric"),
    "awq": ("--method", "awq"),
    "gptq": ("--method", "gptq"),
    "awq+gptq": ("--method", "awq+gptq"),
    "smoothquant": ("--method", "smoothquant"),
}
"""Checkpoints by name: how ``tools.quantize`` makes them."""
KV_FORMATS = ("native", "fp8", "int8")
SAMPLES = 600


def plans(folder: Path) -> dict[str, str]:
    """Overrides by name of the row."""
    ours = {"none": "quantizer=none", "fp8": "quantizer=fp8", "int8": "quantizer=int8", "int4-rtn": "quantizer=int4"}
    return ours | {f"int4-{name}": f"model.path={_path(folder, name)}" for name in WRITTEN if name != "smoothquant"}


def further(folder: Path) -> dict[str, str]:
    """8-bit activations too; with the native KV format alone."""
    return {
        "fp8, fp8 activations": "quantizer=fp8 quantizer.activations=fp8",
        "int8, int8 activations": "quantizer=int8 quantizer.activations=int8",
        "int8-smoothquant, int8 activations": f"model.path={_path(folder, 'smoothquant')} quantizer.activations=int8",
    }


def calibrate(folder: Path) -> None:
    """Write every checkpoint of :data:`WRITTEN` that is not there yet. Raises ``RuntimeError``."""
    text = folder / "calibration.jsonl"
    write_calibration(text, Tokenizer.from_file(str(BUNDLED / "tokenizer.json")), seed=0)
    for name, method in WRITTEN.items():
        out = _path(folder, name)
        words = ["bundled", str(out), *method, "--jsonl", str(text), "--samples", str(SAMPLES), "--device", "cpu"]
        if not out.exists() and quantizing.main(words):
            raise RuntimeError(f"{' '.join(method)} failed")


def _path(folder: Path, name: str) -> Path:
    return folder / name.replace(" ", "-")


def evaluate(folder: Path, named: dict[str, str]) -> list[dict[str, Any]]:
    """Rows of ``engine eval``, the reference first. Raises ``RuntimeError``."""
    result = folder / "quality.json"
    compare = [word for overrides in named.values() for word in ("--compare", overrides)]
    if engine(["eval", "--model", "bundled", "device=cpu", "model.dtype=float32", *compare, "--json", str(result)]):
        raise RuntimeError("engine eval failed")
    rows: list[dict[str, Any]] = json.loads(result.read_text())["rows"]
    return rows


def markdown(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """A table; ``names`` of all rows but the first."""
    lines = [
        "| weights | KV | recall | perplexity | change | KL, nats | top-1 | weights MiB | KV bytes/token |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in zip(("reference", *names), rows, strict=True):
        change = "" if row["perplexity_increase"] is None else f"{row['perplexity_increase']:+.2%}"
        kl, same = (
            "" if row[key] is None else format(row[key], form) for key, form in (("kl", ".5f"), ("agreement", ".2%"))
        )
        cells = [name, row["slots"]["kv_format"], f"{row['exact']:.1%}", f"{row['perplexity']:.3f}", change, kl, same]
        cells += [f"{row['weights_bytes'] / 2**20:.1f}", f"{row['kv_bytes_per_token']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    calibrate(folder)
    named = {
        f"{name}, KV {kv}": f"{overrides} kv_format={kv}"
        for (name, overrides), kv in product(plans(folder).items(), KV_FORMATS)
    }
    named |= further(folder)
    names = [name.partition(", KV ")[0] for name in named]
    table = markdown(names, evaluate(folder, named))
    (folder / "quality.md").write_text(table)
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
