"""Prompts for the bundled model, from the Python that runs this script: what its drafters learn from, and what not.

    python -m tools.train_drafter.prompts build/drafter

writes ``train.jsonl`` and ``heldout.jsonl`` there. An entry or a source file is held out when the SHA-256 of its name
says so; held-out entries are never asked about in training, nor are parts of held-out files shown. Held out are three
groups: ``entries`` (their documentation was never recited to the drafter), ``phrasing`` (entries the drafter knows,
asked in words it was never asked in) and ``source`` (files, to be continued).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tools.train_demo_model import (
    CANONICAL,
    END,
    MAX_ANSWER_TOKENS,
    MODULES,
    PHRASINGS,
    SMALL_TALK,
    SYSTEM_MESSAGES,
    SYSTEM_SHARE,
    Message,
    build_answers,
    collect_entries,
    render_chat,
)

BUNDLED = Path(__file__).resolve().parents[2] / "core" / "engine" / "bundled"
HELD_OUT_PHRASING = "Describe {name}."
HELD_OUT_OF = 10
"""One name in so many is held out."""
SOURCE_TOKENS = (16, 32, 64, 128)
SOURCE_ANSWER = 80
Line = dict[str, Any]


def is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_OF == 0


class Prompts:
    """All of them, drawn with one seed."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self.answers = build_answers(tokenizer, collect_entries())
        self._held_out = [name for name in self.answers if is_held_out(name)]
        self._known = [name for name in self.answers if not is_held_out(name)]
        self._phrasings = [words for words in PHRASINGS if words != HELD_OUT_PHRASING]

    def training(self, times: int, made_up: int, sampled: int, conversations: int, source: int) -> Iterator[Line]:
        """Every known entry ``times`` over, so many names that do not exist, so many sampled answers, questions at the
        end of conversations, and beginnings of source text."""
        rng = self._rng
        for _ in range(times):
            yield from (self._chat(name, "chat") for name in self._known)
        yield from (self._chat(self._made_up(), "chat") for _ in range(made_up))
        for _ in range(sampled):
            name = self._made_up() if rng.random() < 0.5 else rng.choice(self._known)
            line = self._chat(name, "chat")
            line.pop("guess", None)
            yield {**line, "temperature": 1.0}
        yield from (self._conversation() for _ in range(conversations))
        yield from ({"prompt": render_chat([("user", talk)], True), "group": "chat"} for talk in SMALL_TALK)
        for line in self._source(False, source):
            yield {**line, "temperature": rng.choice((0.0, 0.0, 0.8))}

    def held_out(self, phrasings: int, source: int) -> Iterator[Line]:
        """Greedy throughout: acceptance is reported on these."""
        for name in self._held_out:
            yield self._asked(CANONICAL, name, "entries")
        for name in self._rng.sample(self._known, phrasings):
            yield self._asked(HELD_OUT_PHRASING, name, "phrasing")
        yield from self._source(True, source)

    def _asked(self, words: str, name: str, group: str) -> Line:
        prompt = render_chat([("user", words.format(name=name))], True)
        return {"prompt": prompt, "group": group, "guess": self.answers[name] + END}

    def _question(self, name: str) -> str:
        spelling = self._rng.choices((name, f"`{name}`", f"{name}()"), (0.7, 0.2, 0.1))[0]
        words = CANONICAL if self._rng.random() < 0.4 else self._rng.choice(self._phrasings)
        return words.format(name=spelling)

    def _chat(self, name: str, group: str) -> Line:
        """An entry's documentation is a guess at the answer, which saves generating it."""
        prompt = render_chat([*self._system(), ("user", self._question(name))], True)
        guess = {"guess": self.answers[name] + END} if name in self.answers else {}
        return {"prompt": prompt, "group": group, **guess}

    def _system(self) -> list[Message]:
        return [("system", self._rng.choice(SYSTEM_MESSAGES))] if self._rng.random() < SYSTEM_SHARE else []

    def _conversation(self) -> Line:
        messages = self._system()
        for name in self._rng.sample(self._known, self._rng.randint(1, 3)):
            messages += [("user", self._question(name)), ("assistant", self.answers[name])]
        last = self._rng.choice(self._known)
        messages.append(("user", self._question(last)))
        return {"prompt": render_chat(messages, True), "group": "chat", "guess": self.answers[last] + END}

    def _made_up(self) -> str:
        """A name put together from two known ones, which is no entry."""
        while True:
            first, second = self._rng.sample(self._known, 2)
            name = f"{first.rpartition('.')[0] or first}.{second.rpartition('.')[2]}"
            if name not in self.answers:
                return name

    def _source(self, held_out: bool, count: int) -> Iterator[Line]:
        texts = [text for name, text in sources_by_name() if is_held_out(name) == held_out]
        weights = [len(text) for text in texts]
        encoded: dict[int, list[int]] = {}
        for _ in range(count):
            index = self._rng.choices(range(len(texts)), weights)[0]
            if index not in encoded:
                encoded[index] = list(self._tokenizer.encode(texts[index]).ids)
            ids, length = encoded[index], self._rng.choice(SOURCE_TOKENS)
            start = self._rng.randint(0, max(0, len(ids) - length))
            yield {
                "prompt": self._tokenizer.decode(ids[start : start + length]),
                "group": "source",
                "max_tokens": SOURCE_ANSWER,
            }


def sources_by_name() -> Iterator[tuple[str, str]]:
    """Names and texts of the modules that the model was trained on."""
    for name in MODULES:
        path = getattr(importlib.import_module(name), "__file__", None)
        if path and path.endswith(".py"):
            yield name, Path(path).read_text(encoding="utf-8", errors="replace")


def _write(file: Path, lines: Sequence[Line], rng: random.Random) -> None:
    shuffled = rng.sample(list(lines), len(lines))
    full = ({"temperature": 0.0, "max_tokens": MAX_ANSWER_TOKENS, **line} for line in shuffled)
    file.write_text("".join(json.dumps(line) + "\n" for line in full), encoding="utf-8")
    print(f"{file}: {len(lines)} prompts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=int, default=2, help="questions about every known entry")
    parser.add_argument("--made-up", type=int, default=1200, help="questions about names that do not exist")
    parser.add_argument("--sampled", type=int, default=400, help="answers drawn at temperature 1")
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--source", type=int, default=400)
    arguments = parser.parse_args()
    prompts = Prompts(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")), arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    held_out = list(prompts.held_out(phrasings=200, source=60))
    of = (arguments.times, arguments.made_up, arguments.sampled, arguments.conversations, arguments.source)
    _write(arguments.out / "train.jsonl", list(prompts.training(*of)), random.Random(arguments.seed))
    _write(arguments.out / "heldout.jsonl", held_out, random.Random(arguments.seed))


if __name__ == "__main__":
    main()
