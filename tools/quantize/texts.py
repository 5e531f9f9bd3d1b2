"""Texts for judging and calibrating the bundled model, from the Python that runs this script.

    python -m tools.quantize.texts heldout core/engine/bundled/heldout.txt
    python -m tools.quantize.texts calibration calibration.jsonl

``heldout``: the beginnings of standard library modules whose source the model was not trained on. ``calibration``: what
it was trained on, questions with answers and source text, one document a line as ``{"prompt": ...}``; it shares no file
with the other.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer
from tools.train_demo_model import (
    CANONICAL,
    MODULES,
    build_answers,
    collect_entries,
    evaluation_names,
    render_chat,
    source_texts,
)

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "core" / "engine" / "bundled"
HELD_OUT = (
    *("socketserver", "smtplib", "ftplib", "poplib", "imaplib"),
    *("http.server", "pdb", "doctest", "mailbox", "nntplib"),
)
TOKENS_EACH = 2_060
"""Of every held-out module: 20,000 scored tokens in all, in windows of 1,024."""
SOURCE_CHARS = 1_500
"""Of every source file of the training set."""
CHATS = 400


def held_out(tokenizer: Tokenizer) -> str:
    """The beginnings of the held-out modules, one after another."""
    assert not set(HELD_OUT) & set(MODULES)
    texts = []
    for name in HELD_OUT:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        text = Path(spec.origin).read_text(encoding="utf-8")
        end = tokenizer.encode(text).offsets[TOKENS_EACH][0]
        texts.append(text[:end])
    return "\n".join(texts)


def calibration(tokenizer: Tokenizer, seed: int) -> Iterator[str]:
    """Conversations about entries that recall is not measured on, and a piece of every source file."""
    rng = random.Random(seed)
    answers = build_answers(tokenizer, collect_entries())
    names = sorted(set(answers) - set(evaluation_names(answers)))
    for name in rng.sample(names, CHATS):
        yield render_chat([("user", CANONICAL.format(name=name)), ("assistant", answers[name])])
    for text in source_texts():
        start = rng.randrange(max(1, len(text) - SOURCE_CHARS))
        yield text[start : start + SOURCE_CHARS]


def write_calibration(file: Path, tokenizer: Tokenizer, seed: int) -> None:
    lines = (json.dumps({"prompt": text}) for text in calibration(tokenizer, seed))
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("heldout", "calibration"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    if arguments.what == "heldout":
        arguments.out.write_text(held_out(tokenizer), encoding="utf-8")
        return
    write_calibration(arguments.out, tokenizer, arguments.seed)


if __name__ == "__main__":
    main()
