"""Compares the engine's tokenizing with that of ``tokenizers``, the added tokens set up by transformers: encode, chats,
decode and streamed decode over texts of every sort and over random tokens.

    python -m tools.compare_tokenizers models/gemma models/llama --texts 3000

A folder holds ``tokenizer.json``, ``tokenizer_config.json`` and so on; a column counts the differences. Streamed text
cannot take back a character that is out: what differs for this reason alone is counted apart. Exit status 1 when
anything else differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from engine.service.chat_template import TemplateRefused
from engine.service.tokenizer import Tokenizer, TokenizerError
from engine.service.turns import Conversation, Turn

CODE = (
    "def f(x):\n{0}if x:  # é\n{0}{0}return {{'a': [x, '😀']}}\n\n{0}yield None\n",
    'int main() {{\n{0}for (;;)\n{0}{0}puts("%d\\n");\n}}\n',
    "- a\n{0}- b:\n{0}{0}c: |\n{0}{0}{0}d\n",
)
LINES = (
    "The quick brown fox jumps over the lazy dog.", "  two  spaces,   three ", " Hello", "Hello", "don't we'll I'VE",
    "3.14159 1,000,000 0x1F 2026-01-31", "https://example.org/a?b=c&d=%20#e", "<0x0A><0xFF> <0xzz>", "▁▁a▁b ▁ c",
    "Ġa Ċ", "你好，世界。今天天气怎么样？", "日本語のテキスト、カタカナとひらがな。", "안녕하세요 세계",
    "ภาษาไทยไม่มีช่องว่าง", "नमस्ते दुनिया", "مرحبا بالعالم، كيف حالك؟", "שלום עולם, מה שלומך?",
    "\u202bمرحبا\u202c hello \u200fשלום\u200e", "ქართული ენა", "ភាសាខ្មែរ", "Привет, мир!", "Ελληνικά",
    "naïve café, e\u0301 vs é, ﬁ ﬀ Å \u1e9b\u0323", "ǅ ß ẞ İ ı", "𝒜𝔅ℂ 𓀀 🜁 𐍈", "∑∫√∞ ≠ ≤ ₂ ²", "😀😃👍🏽",
    "👨\u200d👩\u200d👧\u200d👦 👩🏽\u200d💻 🏳️\u200d🌈 🏴\u200d☠️", "🇩🇪🇯🇵🇺🇳 1️⃣ #️⃣", "\ufeffbom \u200b\u200c\u200d\u2060",
    "a\r\nb\rc\x0b\x0c\x85d\u2028e\u2029",
)  # fmt: skip
PLANES = ((0x20, 0x7F), (0x80, 0x2FF), (0x300, 0x1FFF), (0x2000, 0x2FFF), (0x3000, 0xD7FF), (0xE000, 0xFFFF),
          (0x10000, 0x1FFFF), (0x20000, 0x10FFFF))  # fmt: skip


@dataclass
class Counts:
    encode: int = 0
    chat: int | None = None
    decode: int = 0
    streamed: int = 0
    taken_back: int = 0
    """Of streams of random tokens: these show a character that the whole text has not."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--texts", type=int, default=2500, help="so many of each folder (%(default)d)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print the first N differences")
    flags = parser.parse_args(arguments)
    logging.set_verbosity_error()
    print("| tokenizer | encode | chat | decode | streamed decode | taken back |\n|---|---|---|---|---|---|")
    different = False
    for folder in flags.folders:
        try:
            counts = Comparison(folder, flags.texts, flags.seed, flags.show).counts
        except TokenizerError as error:
            print(f"| {folder.name} | refused: {error} | | | | |", flush=True)
            different = True
            continue
        chat = "no template" if counts.chat is None else counts.chat
        figures = (counts.encode, chat, counts.decode, counts.streamed, counts.taken_back)
        print(f"| {folder.name} | {' | '.join(map(str, figures))} |", flush=True)
        different |= bool(counts.encode or counts.chat or counts.decode or counts.streamed)
    return int(different)


class Comparison:
    """Of one folder."""

    def __init__(self, folder: Path, num_texts: int, seed: int, show: int) -> None:
        self._show = show
        self._random = random.Random(seed)
        self.counts = Counts()
        self._ours = Tokenizer.from_directory(folder)
        try:
            self._theirs = PreTrainedTokenizerFast.from_pretrained(folder).backend_tokenizer
            self._theirs.no_truncation()
            self._theirs.no_padding()
            added = [token.content for token in self._theirs.get_added_tokens_decoder().values()]
            self._of_texts(list(texts(self._random, num_texts, added)))
            for tokens in self._random_tokens(num_texts):
                self._decodes(tokens, is_random=True)
        finally:
            self._ours.close()

    def _of_texts(self, all_texts: list[str]) -> None:
        for text in all_texts:
            for special in (False, True):
                expected = tuple(self._theirs.encode(text, add_special_tokens=special).ids)
                self.counts.encode += self._differs("encode", text, self._ours.encode_now(text, special), expected)
                self._decodes(list(expected))
            self._chats(text)

    def _chats(self, text: str) -> None:
        """Special tokens in a message are text here, so such a message is none to compare."""
        if self._ours.template is None or self._ours.spells_special(text):
            return
        conversation = Conversation((Turn("user", text),))
        try:
            rendered = self._ours.template.render_now(conversation).text
        except TemplateRefused:
            return
        expected = tuple(self._theirs.encode(rendered, add_special_tokens=False).ids)
        found = self._ours.encode_chat_now(conversation)
        self.counts.chat = (self.counts.chat or 0) + self._differs("chat", text, found, expected)

    def _decodes(self, tokens: list[int], is_random: bool = False) -> None:
        cut = self._random.randint(0, len(tokens))
        for skips in (False, True):
            expected = self._theirs.decode(tokens, skip_special_tokens=skips)
            self.counts.decode += self._differs("decode", tokens, self._ours.decode_now(tokens, skips), expected)
            found = self._streamed(tokens, skips)
            if found != expected and is_random and self._takes_back(tokens, skips):
                self.counts.taken_back += 1
                continue
            self.counts.streamed += self._differs("streamed", tokens, found, expected)
            before = self._theirs.decode(tokens[:cut], skip_special_tokens=skips)
            if "\ufffd" not in expected + before:
                found = before + self._streamed(tokens[cut:], skips, tokens[:cut])
                self.counts.streamed += self._differs("streamed on", tokens, found, expected)

    def _streamed(self, tokens: list[int], skips: bool, after: Sequence[int] = ()) -> str:
        stream = self._ours.stream(skips, after)
        return "".join([*map(stream.feed, tokens), stream.flush()])

    def _takes_back(self, tokens: list[int], skips: bool) -> bool:
        """Whether single bytes spell characters and then, with no other token between, something that is none."""
        names = self._ours.token_bytes
        run = b""
        for token in [*tokens, -1]:
            if token in names.single:
                run += names[token]
            elif token == -1 or (token in names and not (skips and token in self._ours.hidden)):
                text = run.decode(errors="replace")
                if "\ufffd" in text and text.strip("\ufffd"):
                    return True
                run = b""
        return False

    def _random_tokens(self, count: int) -> Iterator[list[int]]:
        """Every token somewhere, between added ones, characters spelled in single bytes, and bytes that are none."""
        size = self._ours.largest_id + 10  # ids without a token, too
        byte = {self._ours.token_bytes[token]: token for token in self._ours.token_bytes.single}
        added = list(self._theirs.get_added_tokens_decoder()) or [size]
        ids = list(range(size))
        self._random.shuffle(ids)
        each = max(1, size // count)
        for start in range(0, size, each):
            tokens = []
            for token in ids[start : start + each]:
                tokens += [token, self._random.choice(added)]
                data = bytes([self._random.randrange(256)]) if token % 8 == 0 else _character(self._random).encode()
                tokens += [byte[data[i : i + 1]] for i in range(len(data)) if data[i : i + 1] in byte]
            yield tokens

    def _differs(self, what: str, of: object, found: object, expected: object) -> bool:
        if found != expected and self._show:
            self._show -= 1
            print(f"{what} {ascii(of)[:300]}\n  found    {ascii(found)[:300]}\n  expected {ascii(expected)[:300]}")
        return found != expected


def _character(source: random.Random) -> str:
    return chr(source.randint(*source.choice(PLANES)))


def texts(source: random.Random, count: int, added: Sequence[str]) -> Iterator[str]:
    """``added``: names of added tokens, which some texts spell."""
    indents = [*(" " * n for n in range(40)), *("\t" * n for n in range(1, 8)), " \t", "\t ", "\u3000", "\xa0\xa0"]
    fixed = [code.format(indent) for code in CODE for indent in indents] + list(LINES)
    fixed += [f"a{chr(code)}b {chr(code)}" for code in (*range(0x20), *range(0x7F, 0xA1), 0xAD, *range(0x2000, 0x2070))]
    fixed += [" " * n + "x" + "\n" * (n % 5) for n in range(64)]
    yield from fixed[:count]
    parts = [*LINES, *indents, "\n", " ", "", "\r\n", "x", "  "]
    for i in range(max(0, count - len(fixed))):
        kind = i % 4
        if kind == 0:
            yield "".join(source.choices(parts, k=source.randint(1, 6)))
        elif kind == 1:
            yield "".join(_character(source) for _ in range(source.randint(1, 30)))
        elif kind == 2:
            line = source.choice(LINES)
            at = source.randint(0, len(line))
            yield line[:at] + _character(source) + line[at:]
        else:
            names = source.choices([*added, *parts], k=source.randint(1, 8))
            yield source.choice(("", " ", "\n")).join(names)


if __name__ == "__main__":
    sys.exit(main())
