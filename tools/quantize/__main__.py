"""Write a quantized checkpoint that this engine and vLLM read (compressed-tensors layout).

    python -m tools.quantize MODEL OUT --method gptq --text calibration.txt
    engine serve --model OUT

MODEL is ``bundled``, a directory or a hub id; OUT must not exist. Methods: ``rtn`` (round to nearest), ``awq``,
``gptq`` and both (4-bit weights), ``smoothquant`` (8-bit weights and activations), ``fp8`` (e4m3 weights and
activations). All but ``rtn`` and ``fp8`` need calibration text that resembles what the model will be used for.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.quantize.layer import METHODS
from tools.quantize.run import quantize

from engine.assembly.errors import AssemblyError
from engine.checkpoint.tensors import CheckpointError
from engine.service.tokenizer import TokenizerError
from engine_lab.shared.flags import at_least


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(words)
    try:
        summary = quantize(arguments)
    except AssemblyError as error:
        print(error.text(), file=sys.stderr)
        return 2
    except (ValueError, CheckpointError, TokenizerError) as error:
        print(f"quantize: {error}", file=sys.stderr)
        return 2
    print(summary)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.quantize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model")
    add("out", type=Path)
    add("--method", choices=METHODS, required=True)
    add("--text", help="calibration: UTF-8 text")
    add("--jsonl", help='calibration: lines of {"prompt": ...}')
    add("--samples", type=at_least(1), default=128, help="pieces of the text, drawn at random")
    add("--sample-tokens", type=at_least(2), default=512, help="most tokens of a piece")
    add("--bits", type=int, choices=(4, 8), default=4, help="of rtn, awq and gptq")
    add("--group-size", type=at_least(1), default=128, help="inputs that share a scale")
    add("--asymmetric", action=argparse.BooleanOptionalAction, help="zero points or none; if not said, awq has them")
    add("--no-act-order", action="store_true", help="gptq: columns as they come, not those with large inputs first")
    add("--damping", type=float, default=0.01, help="gptq: share of the mean added to the Hessian's diagonal")
    add("--alpha", type=float, default=0.5, help="smoothquant: how much moves from activations to weights, 0 to 1")
    add("--head", choices=("none", "int8"), default="none", help="int8: the vocabulary projection too, then untied")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
