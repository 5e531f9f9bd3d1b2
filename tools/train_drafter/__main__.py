"""Train a drafter for a model that this engine serves.

    python -m tools.train_drafter answers MODEL --prompts train.jsonl --answers train.answers.jsonl
    python -m tools.train_drafter eagle3 MODEL --answers train.answers.jsonl --held-out heldout.answers.jsonl \\
        --work build/eagle3 --out head --minutes 60
    engine serve --model MODEL drafter=eagle3 drafter.path=head

MODEL is ``bundled``, a directory or a hub id. ``answers`` lets the target continue prompts; ``eagle3``,
``parallel_block`` and ``draft_model`` learn from that, and report on held-out prompts how many of their tokens the
target accepts, position by position. A run that was stopped goes on with --resume.
``python -m tools.train_drafter.prompts`` has prompts for the bundled model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.train_drafter.answers import answer, read_prompts
from tools.train_drafter.train import MAKERS, train

from engine.assembly.errors import AssemblyError
from engine.checkpoint.tensors import CheckpointError
from engine.service.tokenizer import TokenizerError
from engine_lab.shared.flags import at_least


def main(words: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(words)
    try:
        if arguments.kind == "answers":
            prompts = read_prompts(arguments.prompts, arguments.max_tokens, arguments.temperature)
            answer(arguments.model, prompts, arguments.answers, arguments.device, arguments.dtype, arguments.seed)
            return 0
        print(train(arguments))
    except AssemblyError as error:
        print(error.text(), file=sys.stderr)
        return 2
    except (ValueError, CheckpointError, TokenizerError) as error:
        print(f"train_drafter: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.train_drafter", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    asking = kinds.add_parser("answers", help="let the target continue prompts")
    _add_target(asking)
    asking.add_argument("--prompts", type=Path, required=True, help="lines of JSON: see tools/train_drafter/answers.py")
    asking.add_argument("--answers", type=Path, required=True, help="file to write, or to go on with")
    asking.add_argument("--max-tokens", type=at_least(2), default=256, help="of prompts that do not say")
    asking.add_argument("--temperature", type=float, default=0.0, help="of prompts that do not say")
    for kind in MAKERS:
        training = kinds.add_parser(kind, help=f"train one: drafter={kind}")
        _add_target(training)
        _add_training(training)
        _add_heads(training)
        OPTIONS[kind](training)
    return parser


def _add_target(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="the target computes in")
    add("--seed", type=int, default=0)


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--answers", type=Path, required=True)
    add("--held-out", type=Path, required=True, help="answers to other prompts, which acceptance is measured on")
    add("--work", type=Path, required=True, help="folder of the checkpoint")
    add("--out", type=Path, required=True, help="folder of the drafter")
    add("--start-from", type=Path, help="folder of a drafter of the same sizes, trained before")
    add("--minutes", type=_positive, help="of training steps, in all pieces of the run together")
    add("--steps", type=at_least(1), help="in all pieces of the run together")
    add("--stop-after", type=_positive, default=float("inf"), help="minutes of this piece of the run")
    add("--resume", action="store_true", help="go on from the checkpoint in --work, if there is one")
    add("--export-now", action="store_true", help="measure and write the drafter even if the run is not at its end")
    add("--save-every", type=at_least(1), default=500, help="steps")
    add("--batch-tokens", type=at_least(1), default=2048, help="most tokens of a step, padding included")
    add("--learning-rate", type=_positive, default=1e-3)
    add("--warmup-steps", type=at_least(0), default=100)
    add("--clip", type=_positive, default=0.5)
    add("--choices", type=at_least(1), default=32, help="likeliest tokens of the target that are kept of a position")
    add("--features", type=Path, help="folder of what the target computed, to be shared (default: in --work)")
    add("--no-cache", action="store_true", help="compute the target anew in every pass, keep nothing of it on disk")


def _add_eagle3(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--aux-layers", type=int, nargs=3, help="residuals entering these layers (default 2, L // 2, L - 3)")
    add("--draft-vocab", type=at_least(1), help="tokens that can be drafted, the most frequent (default: all)")
    add("--fc-norm", action="store_true", help="norms of the aux hidden states, as in EAGLE 3.1")
    add("--norm-output", action="store_true", help="norm of what a position hands to the next, as in EAGLE 3.1")
    add("--ttt-steps", type=at_least(1), default=7, help="of the training-time test")


def _add_parallel_block(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--aux-layers", type=int, nargs="+", help="residuals entering these layers (default 2, L // 2, L - 3)")
    add("--draft-vocab", type=at_least(1), help="tokens that can be drafted, the most frequent (default: all)")
    add("--layers", type=at_least(1), required=True)
    add("--block-size", type=at_least(2), default=8, help="tokens of a block, the newest one included")
    add("--mask-token", type=int, required=True, help="id of a token that texts do not have, such as that of padding")


def _add_draft_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=at_least(1), required=True)
    parser.add_argument("--layers", type=at_least(1), required=True)


OPTIONS = {"eagle3": _add_eagle3, "parallel_block": _add_parallel_block, "draft_model": _add_draft_model}


def _add_heads(parser: argparse.ArgumentParser) -> None:
    for name in ("heads", "kv-heads", "head-dim", "intermediate"):
        parser.add_argument(f"--{name}", type=at_least(1), help="(default: the target's)")


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
