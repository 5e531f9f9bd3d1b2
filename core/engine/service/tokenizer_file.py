"""A ``tokenizer.json`` before the tokenizers library reads it: what would make that library abort the process, take
all memory or never end is refused here. What is merely wrong it refuses itself.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from engine.checkpoint.files import CheckpointError, check_values, clipped, read_file
from engine.checkpoint.limits import MAX_NAME_CHARS, MAX_PATTERN_CHARS, MAX_TOKENIZER_BYTES
from engine.checkpoint.patterns import why_endless

SPARE_TOKENS = 1024
"""Ids beyond the vocabulary of ``config.json``: some checkpoints name tokens that their model does not have."""
BYTES_PER_TOKEN, SPARE_BYTES = 1024, 8 * 2**20
"""A file may have so many bytes a token, and so many more. Gemma 3 has 128 a token."""
COMMAS_PER_TOKEN = 8
"""Most commas a token in the vocabulary, and in the merges. Gemma 3 has 4."""
MAX_ADDED_CHARS = 2**18
"""Most characters of all added tokens together. Gemma 3 has less than 100,000."""
MAX_SECTION_BYTES, MAX_SECTION_VALUES = 4 * 2**20, 4096
"""Most bytes, and most values, of a normalizer, pre-tokenizer, post-processor or decoder. The charsmap of
sentencepiece has 320 KB."""
MAX_COMPONENTS = 64
"""Most normalizers, pre-tokenizers or decoders one after another. Models have up to ten."""
MAX_GROWTH = 64
"""How many times as long a text may become on its way to the model, and how many characters may be put before it."""
MAX_TEMPLATE_IDS = 1024
"""Most ids that a post-processor adds to a prompt. Models have up to three."""
_LEAF = 1 << 31
"""The bit of a charsmap's unit that is no step but points to a text."""


class _Model(msgspec.Struct):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")
    merges: msgspec.Raw = msgspec.Raw(b"[]")
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _Added(msgspec.Struct):
    id: int
    content: str


class _File(msgspec.Struct):
    """The parts of a ``tokenizer.json``, as little of them as possible parsed."""

    model: _Model
    added_tokens: list[_Added] | None = None
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    post_processor: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


def read_tokenizer(file: Path, vocab_size: int | None) -> bytes:
    """The bytes of a ``tokenizer.json``, checked. ``vocab_size``: what ``config.json`` says, if it is known.

    Raises :class:`CheckpointError` naming the file and what is wrong.
    """
    own = MAX_TOKENIZER_BYTES if vocab_size is None else SPARE_BYTES + BYTES_PER_TOKEN * vocab_size
    limit = min(MAX_TOKENIZER_BYTES, own)
    name = "MAX_TOKENIZER_BYTES" if limit == MAX_TOKENIZER_BYTES else f"BYTES_PER_TOKEN for vocab_size={vocab_size}"
    data = read_file(file, limit, name)
    try:
        _check(data, vocab_size)
    except CheckpointError as error:
        raise CheckpointError(f"{file.name} cannot be used: {error}") from error
    return data


def _check(data: bytes, vocab_size: int | None) -> None:
    try:
        file = msgspec.json.decode(data, type=_File)
        if vocab_size is not None:
            _check_sizes(file, vocab_size)
        _check_model(file.model)
        check_added([(token.id, token.content) for token in file.added_tokens or ()])
        sections = ("normalizer", "pre_tokenizer", "decoder")
        parts = [_section(name, getattr(file, name)) for name in sections]
        _check_components(parts)
        _check_patterns(parts)
        _check_growth(parts)
        _check_templates(_section("post_processor", file.post_processor))
    except RecursionError as error:
        raise CheckpointError("it is nested too deep") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(str(error)) from error


def _check_sizes(file: _File, vocab_size: int) -> None:
    limit = COMMAS_PER_TOKEN * (vocab_size + SPARE_TOKENS)
    for name, raw in (("vocab", file.model.vocab), ("merges", file.model.merges)):
        count = bytes(raw).count(b",")
        if count > limit:
            raise CheckpointError(
                f"its {name} is too long for vocab_size={vocab_size} of config.json: it has {count} commas, at most "
                f"{limit} are read (COMMAS_PER_TOKEN)"
            )
    added = len(file.added_tokens or ())
    if added > vocab_size + SPARE_TOKENS:
        raise CheckpointError(f"{added} added tokens for vocab_size={vocab_size} of config.json (SPARE_TOKENS)")


def _check_model(model: _Model) -> None:
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(getattr(model, key) or "") > MAX_GROWTH:
            raise CheckpointError(f"its {key} has more than {MAX_GROWTH} characters (MAX_GROWTH)")
    prefix = model.continuing_subword_prefix
    merges = msgspec.json.decode(model.merges) if prefix else None
    for merge in merges if isinstance(merges, list) else []:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or not pair or not str(pair[-1]).startswith(prefix or ""):
            raise CheckpointError(f"merge {clipped(merge)} does not continue with {clipped(prefix)}")


def check_added(added: Collection[tuple[object, str]]) -> None:
    """Raises :class:`CheckpointError` for added tokens, each with its id or name, that are too long."""
    for name, content in added:
        if len(content) > MAX_NAME_CHARS:
            raise CheckpointError(
                f"added token {name} has {len(content)} characters, at most {MAX_NAME_CHARS} are read (MAX_NAME_CHARS)"
            )
    total = sum(len(content) for _, content in added)
    if total > MAX_ADDED_CHARS:
        raise CheckpointError(
            f"its added tokens have {total} characters, at most {MAX_ADDED_CHARS} are read (MAX_ADDED_CHARS)"
        )


def _section(name: str, raw: msgspec.Raw) -> Any:
    data = bytes(raw)
    if len(data) > MAX_SECTION_BYTES:
        raise CheckpointError(f"its {name} is larger than {MAX_SECTION_BYTES} bytes (MAX_SECTION_BYTES)")
    check_values(data, MAX_SECTION_VALUES, f"MAX_SECTION_VALUES in its {name}")
    return msgspec.json.decode(raw)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a section."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _objects(part)


def _check_patterns(parts: list[Any]) -> None:
    patterns = [str(found["Regex"]) for found in _objects(parts) if "Regex" in found]
    total = sum(map(len, patterns)) + sum(len(str(found.get("String", ""))) for found in _objects(parts))
    if total > MAX_PATTERN_CHARS:
        raise CheckpointError(
            f"its patterns have {total} characters, at most {MAX_PATTERN_CHARS} are read (MAX_PATTERN_CHARS)"
        )
    for pattern in patterns:
        if why := why_endless(pattern, by_python=False):
            raise CheckpointError(f"pattern {clipped(pattern)}: {why}")


def _check_components(parts: list[Any]) -> None:
    count = sum("type" in part for part in _objects(parts))
    if count > MAX_COMPONENTS:
        raise CheckpointError(f"it has {count} components, at most {MAX_COMPONENTS} are read (MAX_COMPONENTS)")
    for part in _objects(parts):
        if part.get("type") == "FixedLength" and part.get("length") == 0:
            raise CheckpointError("its pre-tokenizer FixedLength has length=0: expected at least 1")
        if part.get("prepend") == "":
            raise CheckpointError("its normalizer puts the empty string before a text")
        if part.get("type") == "Replace" and part.get("pattern") == {"String": ""}:
            raise CheckpointError("its normalizer replaces the empty string")


def _check_growth(parts: list[Any]) -> None:
    """Refuse components that make a text too long: what they add multiplies, one after another."""
    growth = math.prod(_growth(part) for part in _objects(parts[:2]))
    before = sum(len(str(part.get("prepend", ""))) for part in _objects(parts))
    if growth > MAX_GROWTH or before > MAX_GROWTH:
        made = f"makes a text {growth:g} times as long and puts {before} characters before it"
        raise CheckpointError(f"it {made}, at most {MAX_GROWTH} are allowed (MAX_GROWTH)")


def _growth(part: dict[str, Any]) -> float:
    """How many times as long as before a text may be after a component."""
    if part.get("type") == "ByteLevel":
        return 2.0  # each byte becomes a character, of which many have two bytes
    if "precompiled_charsmap" in part:
        return _check_charsmap(part["precompiled_charsmap"])
    if part.get("type") != "Replace":
        return 1.0
    pattern = part.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    return max(1.0, len(str(part.get("content", ""))) / len(str(text or "-")))


def _check_templates(post_processor: Any) -> None:
    """Refuse templates of a post-processor but those that take a prompt once, and add few tokens, which they know."""
    added = 0
    for part in _objects(post_processor):
        if part.get("type") == "TemplateProcessing":
            added += _added_by(part)
    if added > MAX_TEMPLATE_IDS:
        raise CheckpointError(
            f"its post-processor adds {added} tokens, at most {MAX_TEMPLATE_IDS} may be (MAX_TEMPLATE_IDS)"
        )


def _added_by(template: dict[str, Any]) -> int:
    known = template.get("special_tokens")
    count = 0
    for side, prompts in (("single", ("A",)), ("pair", ("A", "B"))):
        stated = template.get(side)
        pieces = [piece for piece in stated if isinstance(piece, dict)] if isinstance(stated, list) else []
        for token in (piece["SpecialToken"] for piece in pieces if "SpecialToken" in piece):
            name = token.get("id") if isinstance(token, dict) else token
            entry = known.get(name) if isinstance(known, dict) and isinstance(name, str) else None
            ids = entry.get("ids") if isinstance(entry, dict) else None
            if not isinstance(ids, list):
                raise CheckpointError(f"its post-processor adds {clipped(name)}, which its special_tokens lack")
            count += len(ids)
        taken = [piece["Sequence"].get("id") for piece in pieces if isinstance(piece.get("Sequence"), dict)]
        if any(prompt not in prompts for prompt in taken) or len(taken) > len(prompts):
            expected = " and ".join(prompts)
            raise CheckpointError(f"its post-processor takes {clipped(taken)} in {side!r}: expected {expected}")
    return count


def _check_charsmap(text: Any) -> float:
    """The replacements of sentencepiece: a trie whose every step stays inside it, and the texts its leaves point to.

    Four bytes of length, a double array (Yata et al., 2007) of 32-bit units, texts that end with a zero byte each.
    Returns the characters of the longest text: what one may become.
    """
    try:
        data = base64.b64decode(text, validate=True)
        (size,) = struct.unpack_from("<I", data)
        units = struct.unpack(f"<{size // 4}I", data[4 : 4 + size // 4 * 4])
        texts = data[4 + len(units) * 4 :]
        longest = max(map(len, texts.decode().split("\0")))
    except (TypeError, ValueError, struct.error) as error:
        raise CheckpointError("its precompiled_charsmap cannot be read") from error
    if not units:
        raise CheckpointError("its precompiled_charsmap has no trie")
    for at, unit in enumerate(units):
        if at and (unit & _LEAF or not unit & 0xFF):
            continue  # no step leads here
        to = at ^ (unit >> 10) << ((unit & 1 << 9) >> 6)
        if to | 0xFF >= len(units) or (unit >> 8 & 1 and not _begins(texts, units[to] & (_LEAF - 1))):
            raise CheckpointError(f"its precompiled_charsmap leads out of itself at unit {at}")
    return max(1, longest)


def _begins(texts: bytes, at: int) -> bool:
    """Whether a character may begin at a byte of ``texts``."""
    return at == len(texts) or (at < len(texts) and texts[at] & 0xC0 != 0x80)
