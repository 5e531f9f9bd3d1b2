"""From token ids back to text, one token at a time, in constant time, never cutting a character in two."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers


class UnsupportedDecoder(ValueError):
    """The tokenizer's decoder is of a kind whose tokens are not sequences of bytes."""


def byte_of_symbol() -> dict[str, int]:
    """The printable alphabet in which byte-level BPE writes bytes (GPT-2's)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_OF_SYMBOL = byte_of_symbol()


class TokenBytes:
    """The bytes each token stands for, by id, wherever in a text it is but at its beginning.

    Decoders are byte-level BPE, where a token is bytes of the text, or sentencepiece style, where it is text (a
    word-boundary symbol in it) or, with ``ByteFallback``, one byte, spelled ``<0x0A>``. Added tokens go through the
    decoder like all others. What a decoder drops at the beginning of a text, :class:`IncrementalDetokenizer` drops.
    """

    def __init__(self, section: Any, decoder: tokenizers.decoders.Decoder | None, vocab: Mapping[int, str]) -> None:
        """``section``: the ``decoder`` of a ``tokenizer.json``. ``decoder``: the same, as the library reads it.
        ``vocab``: all tokens, added ones included. Raises :class:`UnsupportedDecoder`."""
        steps = list(_steps(section))
        kinds = [str(step.get("type")) for step in steps]
        self.byte_level = "ByteLevel" in kinds
        expected = _BYTE_LEVEL if self.byte_level else _SENTENCEPIECE
        fused = steps[kinds.index("Fuse") + 1 :] if "Fuse" in kinds else []
        known = set(kinds) <= expected and not any(step.get("stop") for step in steps)
        if decoder is None or not known or [step["type"] for step in fused] not in ([], ["Strip"]):
            raise UnsupportedDecoder(f"decoder {kinds or 'none'}: expected byte-level or sentencepiece style")
        self.stripped = "".join(step["content"] * step["start"] for step in fused)
        """The decoder drops these characters from the beginning of a text, as far as they are there."""
        self.drops_boundary = "Metaspace" in kinds
        """The decoder may drop word boundaries from the first token."""
        found = vocab.items() if "ByteFallback" in kinds else ()
        self.single = frozenset(id_ for id_, piece in found if len(piece) == 6 and _BYTE.fullmatch(piece))
        """Ids of the tokens that are one byte each."""
        self._decoder = decoder
        self._vocab = vocab
        self._known: dict[int, bytes] = {}

    def __contains__(self, token: int) -> bool:
        return token in self._vocab

    def __getitem__(self, token: int) -> bytes:
        """The bytes of a token: none for an id without a token (padding of the vocabulary)."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._compute(token)
        return known

    def first(self, token: int) -> bytes:
        """The bytes of a token that is the first of a text."""
        if not self.drops_boundary or token in self.single:
            return self[token]
        return self._decoder.decode([self._vocab[token]]).encode()

    def _compute(self, token: int) -> bytes:
        piece = self._vocab.get(token)
        if piece is None:
            return b""
        if token in self.single:
            return bytes([int(piece[3:5], 16)])
        if not self.byte_level:
            return self._decoder.decode([_BEFORE, piece]).removeprefix(_BEFORE).encode()
        if all(symbol in _BYTE_OF_SYMBOL for symbol in piece):
            return bytes(_BYTE_OF_SYMBOL[symbol] for symbol in piece)
        return piece.encode()


_BEFORE = "a"
"""A token that is not the first comes after this one."""
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_BYTE_LEVEL = {"ByteLevel", "Fuse"}
_SENTENCEPIECE = {"Replace", "Metaspace", "ByteFallback", "Strip", "Fuse"}


def _steps(decoder: Any) -> Iterator[dict[str, Any]]:
    if isinstance(decoder, dict) and decoder.get("type") == "Sequence":
        for part in decoder.get("decoders", ()):
            yield from _steps(part)
    elif isinstance(decoder, dict):
        yield decoder


class _ByteRun:
    """Neighbouring tokens of one byte each. A run that is no UTF-8 becomes one U+FFFD for each byte, but for what of it
    was complete before."""

    def __init__(self) -> None:
        self._held = b""
        self._broken = False

    def feed(self, byte: bytes) -> str:
        self._held += byte
        if not self._broken:
            try:
                text, self._held = self._held.decode(), b""
                return text
            except UnicodeDecodeError as error:
                if error.end == len(self._held) and error.reason == "unexpected end of data":
                    return ""
            self._broken = True
        return self._replaced()

    def end(self) -> str:
        self._broken = False
        return self._replaced()

    def _replaced(self) -> str:
        count, self._held = len(self._held), b""
        return "\ufffd" * count


class IncrementalDetokenizer:
    """Text of a growing sequence of tokens.

    Bytes of an unfinished character are held until it is complete; bytes that can never be UTF-8 become U+FFFD.
    The concatenation of all results does not depend on how the tokens were grouped. It is the text of the whole
    sequence, but where single bytes spell characters and then something that is none: the whole sequence has U+FFFD
    for these characters, too, which are out long before.
    """

    __slots__ = ("_bytes", "_decode", "_first", "_hidden", "_stripped", "_text", "_tokens", "begins")

    def __init__(self, tokens: TokenBytes, hidden: frozenset[int] = frozenset()) -> None:
        """``hidden``: ids without visible text (special tokens)."""
        self.begins = True
        """The decoder may drop something from the next token that it would not drop later."""
        self._tokens = tokens
        self._hidden = hidden
        self._first = True
        self._stripped = tokens.stripped
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")
        self._bytes = _ByteRun()
        self._text = self._of_bytes if tokens.byte_level else self._of_pieces

    def feed(self, token: int) -> str:
        if token in self._hidden:
            return ""
        return self._beginning(token) if self.begins else self._text(token, self._tokens[token])

    def flush(self) -> str:
        """What is left of an unfinished character (as U+FFFD), at the end of the sequence."""
        return self._decode.decode(b"", True) + self._bytes.end()

    def _of_bytes(self, token: int, data: bytes) -> str:
        return self._decode.decode(data)

    def _of_pieces(self, token: int, data: bytes) -> str:
        if token in self._tokens.single:
            return self._bytes.feed(data)
        return self._bytes.end() + data.decode() if token in self._tokens else ""

    def _beginning(self, token: int) -> str:
        """Text of a token at the beginning of a sequence, without what the decoder drops there."""
        if token not in self._tokens:
            return ""
        text = self._text(token, self._tokens.first(token) if self._first else self._tokens[token])
        self._first = False
        while text and self._stripped.startswith(text[0]):
            text, self._stripped = text[1:], self._stripped[1:]
        self.begins = not text and bool(self._stripped)
        return text
