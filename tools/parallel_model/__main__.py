"""What tensor, pipeline and expert parallelism would give, estimated: no device is needed, nothing is measured.

    python -m tools.parallel_model                      # Llama-3.1-8B, 70B and Qwen3-30B-A3B on 1 to 8 cards
    python -m tools.parallel_model --fit                # what it was fitted to, and how well
    python -m tools.parallel_model --models Llama-3.1-8B --devices mine.json --figures mine.md --method shm

Prints tables of Markdown with their inputs. ``--devices``: names, or JSON files with an object of the fields of
``engine_lab.shared.estimates.devices.Device``; ``--efficiency``: one with those of
``engine_lab.shared.estimates.efficiency.Efficiency``; ``--figures``: a file with what
``tools/benchmarks/collectives.py`` has printed, or a JSON file with a list of objects of the fields of
``engine_lab.shared.estimates.collectives.Figure``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.parallel_model import printed
from tools.parallel_model.models import SHAPES
from tools.parallel_model.tables import Question, fit_table, inputs, model_table

from engine_lab.shared.estimates.collectives import PUBLISHED, Figure, figures_from
from engine_lab.shared.estimates.devices import DEVICES, device, device_from
from engine_lab.shared.estimates.efficiency import SERVING, efficiency_from
from engine_lab.shared.estimates.errors import EstimateError

ASKED = ("Llama-3.1-8B", "Llama-3.1-70B", "Qwen3-30B-A3B")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit to published figures and print each one's residual")
    parser.add_argument("--models", nargs="+", default=ASKED, choices=SHAPES, metavar="NAME", help=", ".join(SHAPES))
    parser.add_argument("--devices", nargs="+", default=("H100", "H200"), help=f"{', '.join(DEVICES)}, or JSON files")
    parser.add_argument("--figures", type=Path, help="file with times of all-reduces, instead of published ones")
    parser.add_argument("--method", nargs="+", default=["NCCL", "one-shot"], help="by which ranks add up (%(default)s)")
    parser.add_argument("--efficiency", type=Path, help="JSON file, instead of what was fitted")
    parser.add_argument("--context", type=int, default=2048, help="tokens after which a token is decoded (%(default)s)")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt (%(default)s)")
    options = parser.parse_args(arguments)
    if options.fit:
        print("\n".join(fit_table()))
        return
    try:
        question = Question(
            devices=tuple(
                device_from(_json(Path(it))) if it.endswith(".json") else device(it) for it in options.devices
            ),
            figures=_figures(options.figures) if options.figures else PUBLISHED,
            methods=tuple(options.method),
            efficiency=efficiency_from(_json(options.efficiency)) if options.efficiency else SERVING,
            context=options.context,
            prompt=options.prompt,
        )
        print("\n".join(inputs(question)))
        for model in options.models:
            print("\n".join(["", *model_table(model, question)]))
    except EstimateError as error:
        sys.exit(f"parallel_model: {error}")


def _figures(file: Path) -> tuple[Figure, ...]:
    return figures_from(_json(file)) if file.suffix == ".json" else printed.figures(_text(file), file.name)


def _json(file: Path) -> object:
    try:
        found: object = json.loads(_text(file))
    except ValueError as error:
        raise EstimateError(f"{file}: {error}") from error
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise EstimateError(f"{file}: {error}") from error


if __name__ == "__main__":
    main()
