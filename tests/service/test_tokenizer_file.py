"""What a ``tokenizer.json`` may hold. Hostile ones: ``tests/checkpoint/test_hostile.py``."""

from __future__ import annotations

import base64
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from engine.assembly.model_config import bundled_dir
from engine.checkpoint.files import CheckpointError
from engine.service.tokenizer import Tokenizer, TokenizerError
from engine.service.tokenizer_file import read_tokenizer


def changed(folder: Path, **changes: Any) -> Path:
    """The bundled model's tokenizer with other sections."""
    stored = json.loads((bundled_dir() / "tokenizer.json").read_text())
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(stored | changes))
    return file


def charsmap() -> bytes:
    """A trie that replaces ``a`` by ``b``: its root, a step by that letter, and the leaf after it."""
    units = [0] * 512
    units[0] = 256 << 10
    units[256 ^ ord("a")] = ord("a") | 1 << 8 | 2 << 10
    units[256 ^ ord("a") ^ 2] = 1 << 31
    return struct.pack("<I512I", 4 * 512, *units) + b"b\0"


def test_a_charsmap_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    assert tokenizers.normalizers.Precompiled(charsmap()).normalize_str("a cab") == "b cbb"
    text = base64.b64encode(charsmap()).decode()
    read_tokenizer(changed(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": text}), 4096)


def test_a_damaged_charsmap_is_refused_or_harmless(tmp_path: Path) -> None:
    """One that leads out of itself ends the process that uses it, or a thread of it."""
    rng, refused = random.Random(7), 0
    sample = "".join(map(chr, range(1, 256)))
    file = tmp_path / "tokenizer.json"
    for _ in range(300):
        damaged = bytearray(charsmap())
        at = rng.choice((rng.randrange(len(damaged)), 4 + 4 * rng.choice((0, 256 ^ ord("a"))) + rng.randrange(4)))
        damaged[at] = rng.randrange(256)
        text = base64.b64encode(damaged).decode()
        file.write_text(json.dumps({"model": {}, "normalizer": {"type": "Precompiled", "precompiled_charsmap": text}}))
        try:
            read_tokenizer(file, 4096)
        except CheckpointError:
            refused += 1
            continue
        tokenizers.normalizers.Precompiled(bytes(damaged)).normalize_str(sample)
    assert 0 < refused < 300


def test_sections_of_published_tokenizers_are_read(tmp_path: Path) -> None:
    gemma = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    llama2 = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, gemma]}
    steps = [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "add_prefix_space": False}]
    begin = {"SpecialToken": {"id": "<|begin|>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    template = {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, begin, second],
        "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [1], "tokens": ["<|begin|>"]}},
    }
    sections = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "post_processor": template}
    for normalizer in (gemma, llama2, {"type": "NFC"}, None):
        read_tokenizer(changed(tmp_path, normalizer=normalizer, **sections), 4096)


def test_a_text_on_which_the_library_panics_is_refused_alone(tmp_path: Path) -> None:
    pattern = {"type": "Replace", "pattern": {"Regex": "(?=q)"}, "content": "x"}
    changed(tmp_path, normalizer=pattern)
    tokenizer = Tokenizer.from_directory(tmp_path, 4096)
    with pytest.raises(TokenizerError, match="cannot handle this text"):
        tokenizer.encode_now("quick")
    assert tokenizer.encode_now("brown")


def test_a_tokenizer_may_name_a_few_tokens_that_the_model_lacks(tmp_path: Path) -> None:
    more = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    known = json.loads((bundled_dir() / "tokenizer.json").read_text())["added_tokens"]
    changed(tmp_path, added_tokens=[*known, more | {"id": 4096, "content": "<pad>"}])
    assert Tokenizer.from_directory(tmp_path, 4096).largest_id == 4096
