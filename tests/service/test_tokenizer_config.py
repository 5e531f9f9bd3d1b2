"""Tokens that a model's files name beside ``tokenizer.json`` are what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models
from transformers import PreTrainedTokenizerFast

from engine.service.tokenizer import Tokenizer, TokenizerError
from engine.service.turns import Conversation, Turn

PLAIN = "abcdefghijklmnopqrstuvwxyz<>/| "
FIRST = len(PLAIN) + 2
"""The id of the first token that is added."""


def token(content: str, **flags: bool) -> dict[str, Any]:
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True} | flags
    return {"content": content, **flags}


def write(
    folder: Path, config: Any = None, special: Any = None, added: Any = None, own: tuple[AddedToken, ...] = ()
) -> Path:
    vocab = {character: i for i, character in enumerate(PLAIN)} | {"<s>": FIRST - 2, "</s>": FIRST - 1}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.Fuse()
    backend.add_tokens(list(own))
    backend.save(str(folder / "tokenizer.json"))
    files = {"tokenizer_config.json": config, "special_tokens_map.json": special, "added_tokens.json": added}
    for name, content in files.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


CASES: dict[str, dict[str, Any]] = {
    "names in the map alone": {"special": {"bos_token": "<s>", "eos_token": token("</s>", lstrip=True)}},
    "the map beside a config": {"config": {"pad_token": "a"}, "special": {"bos_token": "<s>"}},
    "the map wins": {"config": {"bos_token": "b"}, "special": {"bos_token": "<s>"}},
    "added_tokens_decoder wins": {
        "config": {"bos_token": "<c>", "added_tokens_decoder": {str(FIRST): token("<c>")}},
        "special": {"bos_token": "<s>"},
        "added": {"<x>": FIRST + 1},
    },
    "tokens in added_tokens.json alone": {"config": {"eos_token": "<y>"}, "added": {"<x>": FIRST, "<y>": FIRST + 1}},
    "tokens in added_tokens_decoder alone": {
        "config": {
            "added_tokens_decoder": {
                str(FIRST): token("<x>", special=False, rstrip=True),
                str(FIRST + 1): token("<y>", lstrip=True),
            }
        }
    },
    "flags of added_tokens_decoder": {
        "config": {"added_tokens_decoder": {str(FIRST): token("<x>")}},
        "own": (AddedToken("<x>"),),
    },
    "a name makes a token special": {"config": {"eos_token": "<x>"}, "own": (AddedToken("<x>"),)},
    "a name beside added_tokens_decoder does not": {
        "config": {"eos_token": "<x>", "added_tokens_decoder": {}},
        "own": (AddedToken("<x>"),),
    },
    "names of the model's own": {"config": {"image_token": "<i>", "extra_special_tokens": {"end_token": "<e>"}}},
    "further special tokens": {"config": {"additional_special_tokens": ["<p>", "<q>", "<p>"]}},
    "null is no name": {"config": {"bos_token": None, "add_bos_token": True, "eos_token": "</s>"}},
    "nothing": {},
}
TEXT = "a <x> b<y> <s></s> <p><q> <i><e><c> c"


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(write(tmp_path, **CASES[case]))
    ours = Tokenizer.from_directory(tmp_path)

    assert ours.encode_now(TEXT) == (ids := tuple(theirs.encode(TEXT)))
    for skips in (False, True):
        assert ours.decode_now(ids, skips) == theirs.decode(ids, skip_special_tokens=skips)
    expected = {id_: token.content for id_, token in theirs.added_tokens_decoder.items() if token.special}
    assert {id_: content for content, id_ in ours.special_ids.items()} == expected
    ours.close()


VARIABLES = (
    "{% for name, value in [('bos', bos_token), ('eos', eos_token), ('tools', tools), ('documents', documents)] %}"
    "{{ name }}: {{ value is defined }} {{ value is none }} {{ value }}\n{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


@pytest.mark.parametrize("bos", ["<s>", token("<s>")], ids=["text", "object"])
def test_a_template_has_the_names_that_transformers_gives_it(bos: Any, tmp_path: Path) -> None:
    write(tmp_path, {"chat_template": VARIABLES, "eos_token": None}, {"bos_token": bos})
    messages = [{"role": "user", "content": "x"}]
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.template is not None
    assert ours.template.render_now(Conversation((Turn("user", "x"),), False)).text == theirs
    assert "bos: True False <s>\neos: False False \ntools: True True None\ndocuments: True True None\nx" in theirs
    ours.close()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"added": {"<x>": FIRST + 5}},
            rf"added token '<x>' has id {FIRST + 5} in .*, and tokenizer.json makes it {FIRST}",
        ),
        ({"added": {"<x>": "five"}}, r"added_tokens.json: 'five' is no id of an added token"),
        ({"added": {"x" * 100_000: FIRST}}, "100000 characters"),
        ({"config": {"added_tokens_decoder": 5}}, "added_tokens_decoder is 5: expected an object"),
        ({"config": {"added_tokens_decoder": {"5": 5}}}, "expected the text of a token, or an object with it"),
        ({"config": {"bos_token": {"content": 5}}}, "bos_token is .*: expected the text of a token"),
        ({"special": []}, "special_tokens_map.json: it is not a JSON object"),
    ],
)
def test_files_that_make_no_sense_are_refused(files: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.from_directory(write(tmp_path, **files))
