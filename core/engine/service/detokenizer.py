"""From token ids back to text, one token at a time, in constant time, never cutting a character in two."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Any


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
    """The bytes each token stands for, by id.

    ``decoder`` is the ``decoder`` section of a ``tokenizer.json``: byte-level BPE, or sentencepiece style (a
    word-boundary symbol, bytes as ``<0x0A>``). Raises :class:`UnsupportedDecoder` for any other.
    """

    def __init__(self, decoder: Any, vocab: Mapping[int, str], added: Mapping[int, str]) -> None:
        kinds = _decoder_kinds(decoder)
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level and not kinds & {"ByteFallback", "Metaspace", "Fuse", "Replace"}:
            raise UnsupportedDecoder(f"decoder {sorted(kinds) or 'none'}: expected byte-level or sentencepiece style")
        self._vocab = vocab
        self._added = added
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        """Ids without a token (padding of the vocabulary) stand for nothing."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._compute(token)
        return known

    def _compute(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._vocab.get(token)
        if piece is None:
            return b""
        if self._byte_level:
            if all(symbol in _BYTE_OF_SYMBOL for symbol in piece):
                return bytes(_BYTE_OF_SYMBOL[symbol] for symbol in piece)
            return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


def _decoder_kinds(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    if decoder.get("type") == "Sequence":
        return set().union(*(_decoder_kinds(part) for part in decoder.get("decoders", ())))
    return {str(decoder.get("type"))}


class IncrementalDetokenizer:
    """Text of a growing sequence of tokens.

    Bytes of an unfinished character are held until it is complete; bytes that can never be UTF-8 become U+FFFD.
    The concatenation of all results does not depend on how the tokens were grouped.
    """

    __slots__ = ("_decode", "_hidden", "_token_bytes")

    def __init__(self, token_bytes: TokenBytes, hidden: frozenset[int] = frozenset()) -> None:
        """``hidden``: ids without visible text (special tokens)."""
        self._token_bytes = token_bytes
        self._hidden = hidden
        self._decode = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return "" if token in self._hidden else self._decode.decode(self._token_bytes[token])

    def flush(self) -> str:
        """What is left of an unfinished character (as U+FFFD), at the end of the sequence."""
        return self._decode.decode(b"", True)
