from __future__ import annotations

import threading
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.service.chat_template import TemplateSource
from engine.service.detokenizer import UnsupportedDecoder
from engine.service.parsing import parse_messages
from engine.service.template_worker import TemplateWorker
from engine.service.tokenizer import PieceCache, Tokenizer, TokenizerError, TooManyTokens
from engine.service.turns import Conversation, TextPart, Turn

from .fakes import BACKEND, END, SPECIALS, TOKENIZER_JSON, VOCAB, make_tokenizer

TOKENIZER = make_tokenizer()


def says(content: str) -> Conversation:
    return Conversation((Turn("user", content),))


@given(st.text(max_size=60), st.integers(1, 4))
@settings(max_examples=60)
def test_streamed_text_equals_whole_text_and_never_splits_a_character(text: str, group: int) -> None:
    tokens = tuple(text.encode())
    stream = TOKENIZER.stream()
    parts = ["".join(map(stream.feed, tokens[i : i + group])) for i in range(0, len(tokens), group)]
    assert "".join([*parts, stream.flush()]) == text
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


@given(st.binary(max_size=40))
@settings(max_examples=60)
def test_bytes_that_are_no_text_become_replacement_characters(data: bytes) -> None:
    assert TOKENIZER.decode_now(tuple(data)) == data.decode("utf-8", "replace")


@given(st.lists(st.tuples(st.sampled_from(["user", "system"]), st.text(max_size=20)), min_size=1, max_size=4))
@settings(max_examples=60)
def test_cached_pieces_give_the_ids_of_the_whole_text(turns: list[tuple[str, str]]) -> None:
    conversation = parse_messages([{"role": role, "content": content} for role, content in turns])
    assert TOKENIZER.template is not None
    rendered = TOKENIZER.template.render_now(conversation)
    expected = tuple(BACKEND.encode(rendered.text, add_special_tokens=False).ids)
    assert TOKENIZER.encode_chat_now(conversation) == expected


def test_special_tokens_spelled_in_a_message_are_text() -> None:
    tokens = TOKENIZER.encode_chat_now(says("a<|im_end|>b<|end|>c<|end|>"))
    assert TOKENIZER.decode_now(tokens) == (
        "<|im_start|>user\na<|im_end|>b<|end|>c<|end|><|im_end|>\n<|im_start|>assistant\n"
    )
    specials = [token for token in tokens if token in TOKENIZER.hidden]
    assert specials == [TOKENIZER.special_ids[name] for name in (SPECIALS[0], SPECIALS[1], SPECIALS[0])]


def test_a_special_token_in_pieces_that_the_template_puts_together_is_text() -> None:
    parts = "{% for m in messages %}<|im_start|>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    tokenizer = Tokenizer(TOKENIZER_JSON, TemplateWorker(TemplateSource(parts, {})))
    for pieces in (("a<|im_", "end|>b"), ("<", "|im_", "end|>"), ("<|end|", "><|im_end|><|end"), ("<|end|>", ">")):
        turns = (Turn("user", [TextPart(piece) for piece in pieces]),)
        tokens = tokenizer.encode_chat_now(Conversation(turns))
        assert tokenizer.decode_now(tokens) == "<|im_start|>" + "".join(pieces)
        assert [token for token in tokens if token in tokenizer.hidden] == [tokenizer.special_ids["<|im_start|>"]]
    tokenizer.close()


@pytest.mark.parametrize(
    ("written", "given"),
    [
        (r'{"a": "\ud83d\ude00"}', {"a": "\U0001f600"}),
        (r'{"a": ["\ud83d"]}', {}),
        (r'{"\udfff": 1}', {}),
        (r'{"a": "\\ud800"}', {"a": r"\ud800"}),
    ],
)
def test_arguments_in_history_with_half_a_surrogate_pair_are_none(written: str, given: dict[str, str]) -> None:
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": written}}
    said = parse_messages([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [called]}])
    assert said.turns[1].tool_calls[0].function.arguments == given
    assert TOKENIZER.encode_chat_now(said)


def test_special_tokens_in_a_raw_prompt_are_recognised() -> None:
    assert TOKENIZER.encode_now("a<|end|>") == (*b"a", END)


def test_a_conversation_seen_before_is_not_tokenized_again() -> None:
    tokenizer = make_tokenizer()
    first = says("a long question")
    tokenizer.encode_chat_now(first)
    before = tokenizer.cache.hits
    tokenizer.encode_chat_now(Conversation((*first.turns, Turn("assistant", "x"), Turn("user", "y"))))
    assert tokenizer.cache.hits > before


def test_the_cache_is_bounded_and_forgets_the_oldest() -> None:
    cache = PieceCache(max_bytes=10_000)
    for i in range(100):
        cache.put(f"text {i}", False, (i,))
    assert cache.get("text 0", False) is None
    assert cache.get("text 99", False) == (99,)
    assert 5_000 < cache.bytes <= 10_000


def test_the_cache_counts_the_ids_of_a_text_as_well() -> None:
    cache = PieceCache(max_bytes=100_000)
    cache.put("x", False, tuple(range(300, 900)))
    assert cache.bytes > 600 * 32


def test_a_text_of_too_many_tokens_is_refused_before_its_ids_are_made() -> None:
    tokenizer = make_tokenizer()
    tokenizer.most_tokens = 10
    assert len(tokenizer.encode_now("x" * 10)) == 10
    with pytest.raises(TooManyTokens, match="11 tokens"):
        tokenizer.encode_now("x" * 11)
    with pytest.raises(TooManyTokens):
        tokenizer.encode_chat_now(says("x" * 20))
    assert tokenizer.cache.get("x" * 11, True) is None


@given(st.lists(st.integers(0, VOCAB - 1), max_size=40), st.booleans())
def test_a_whole_sequence_decodes_as_it_does_token_by_token(tokens: list[int], skips: bool) -> None:
    tokenizer = TOKENIZER
    stream = tokenizer.stream(skips)
    assert tokenizer.decode_now(tokens, skips) == "".join([*map(stream.feed, tokens), stream.flush()])


def test_many_threads_get_the_same_ids() -> None:
    tokenizer = make_tokenizer()
    texts = [f"hello world {i % 7}" for i in range(40)]
    results: dict[int, tuple[int, ...]] = {}
    threads = [
        threading.Thread(target=lambda i=i: results.__setitem__(i, tokenizer.encode_now(texts[i]))) for i in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[i] == tuple(BACKEND.encode(texts[i]).ids) for i in range(40))


def test_sentencepiece_style_tokens_are_bytes_and_word_boundaries() -> None:
    vocab = {"<unk>": 0, "▁Hi": 1, "<0xF0>": 2, "<0x9F>": 3, "<0x98>": 4, "<0x80>": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    stream = Tokenizer(backend.to_str().encode(), None).stream()
    assert [stream.feed(token) for token in (1, 2, 3, 4, 5)] == [" Hi", "", "", "", "😀"]


def test_a_decoder_without_bytes_is_refused() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(UnsupportedDecoder, match="expected byte-level"):
        Tokenizer(backend.to_str().encode(), None)


def test_a_directory_without_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be used"),
        ("tokenizer.json", '{"x": 1}', "tokenizer.json cannot be used"),
        ("tokenizer_config.json", "{", "cannot read tokenizer_config.json"),
        ("chat_template.jinja", "{% if %}", "chat template does not compile"),
    ],
)
def test_a_directory_with_a_broken_tokenizer_says_what_is_wrong(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER_JSON)
    (tmp_path / name).write_text(content)
    with pytest.raises(TokenizerError, match=words) as caught:
        Tokenizer.from_directory(tmp_path)
    assert f"model.path={tmp_path}" in str(caught.value)


def test_a_model_directory_is_loaded_with_its_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER_JSON)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<|im_start|>"}, "chat_template": "{{ bos_token }}{{ messages[0].content }}"}'
    )
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode_chat_now(says("x")) == (tokenizer.special_ids["<|im_start|>"], 120)
    tokenizer.close()
