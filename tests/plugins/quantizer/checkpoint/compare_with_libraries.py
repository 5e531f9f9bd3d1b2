"""Logits of checkpoints that libraries wrote against those of the weights that the libraries dequantized.

    python -m tests.plugins.quantizer.checkpoint.compare_with_libraries FOLDER

``FOLDER`` is that of ``write_with_library.py``. Both are loaded by the engine in float32, activations unrounded; prints
a Markdown table and ends with 1 if a checkpoint is further from its weights than rounding of float32 takes it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.plugins.quantizer.checkpoint.reference import LARGEST, difference


def main() -> int:
    folder = Path(sys.argv[1])
    wrong = 0
    print("| library | checkpoint | largest relative error of logits |\n|---|---|---|")
    for library in sorted(path for path in folder.iterdir() if path.is_dir()):
        versions = (library / "versions.txt").read_text()
        for dense in sorted(library.glob("*.dense")):
            case = dense.with_suffix("")
            try:
                found = difference(case, dense)
                text, is_wrong = f"{found:.1e}", found > LARGEST
            except Exception as error:
                text, is_wrong = f"{type(error).__name__}: {error}", True
            wrong += is_wrong
            print(f"| {versions} | {case.name} | {text} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
