"""Text from tokens is what ``tokenizers`` makes of them, for every kind of decoder, whole and streamed."""

from __future__ import annotations

import functools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from engine.service.detokenizer import UnsupportedDecoder, byte_of_symbol
from engine.service.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "▁▁", "▁Hi", "Hi", "é", "😀", "▁a▁b", "<0xZZ>", "<0x-5>", "a<0x41>", ""]
ADDED = [
    AddedToken("▁▁▁▁"),  # Gemma's indents
    AddedToken("  "),
    AddedToken("<tool▁call>", normalized=True),
    AddedToken("Ġé"),
    AddedToken("▁<x>", special=True),
    AddedToken("<end of text>", special=True),
]
SPACES, SINGLE = decoders.Replace("▁", " "), decoders.ByteFallback()
DECODERS = {
    "byte-level": decoders.ByteLevel(),
    "gemma": decoders.Sequence([SPACES, SINGLE, decoders.Fuse()]),
    "llama 2": decoders.Sequence([SPACES, SINGLE, decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    "strips two": decoders.Sequence([SPACES, SINGLE, decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    "t5": decoders.Metaspace(),
    "metaspace, never before": decoders.Metaspace(prepend_scheme="never"),
    "metaspace with bytes": decoders.Sequence([SINGLE, decoders.Metaspace(), decoders.Fuse()]),
    "replace alone": decoders.Sequence([SPACES]),
    "strips every token": decoders.Sequence([SPACES, decoders.Strip(" ", 1, 0), decoders.Fuse()]),
    "nested": decoders.Sequence([decoders.Sequence([SPACES, SINGLE]), decoders.Sequence([decoders.Fuse()])]),
}


@functools.cache
def make(kind: str) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    names = list(byte_of_symbol()) if kind == "byte-level" else BYTES
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(["<unk>", *names, *PIECES]))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.decoder = DECODERS[kind]
    backend.add_tokens(ADDED)
    return Tokenizer(backend.to_str().encode(), None), backend


def streamed(tokenizer: Tokenizer, tokens: list[int], skips: bool, after: tuple[int, ...] = ()) -> str:
    stream = tokenizer.stream(skips, after)
    return "".join([*map(stream.feed, tokens), stream.flush()])


def readable(tokenizer: Tokenizer, tokens: list[int], skips: bool) -> bool:
    """Whether every run of single bytes is whole characters, or none."""
    runs, run = [], bytearray()
    for token in tokens:
        if token in tokenizer.token_bytes.single:
            run += tokenizer.token_bytes[token]
        elif token in tokenizer.token_bytes and not (skips and token in tokenizer.hidden):
            runs.append(bytes(run))
            run = bytearray()
    texts = [run.decode(errors="replace") for run in [*runs, bytes(run)]]
    return all("\ufffd" not in text or not text.strip("\ufffd") for text in texts)


@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.data(), skips=st.booleans())
@settings(max_examples=30)
def test_text_is_what_tokenizers_decodes(kind: str, data: st.DataObject, skips: bool) -> None:
    tokenizer, backend = make(kind)
    count = backend.get_vocab_size()
    any_token = st.one_of(st.integers(0, count + 3), st.integers(count - len(ADDED) - len(PIECES), count + 1))
    tokens = data.draw(st.lists(any_token, max_size=12))
    expected = backend.decode(tokens, skip_special_tokens=skips)
    assert tokenizer.decode_now(tokens, skips) == expected
    if readable(tokenizer, tokens, skips):
        assert streamed(tokenizer, tokens, skips) == expected


@pytest.mark.parametrize("kind", DECODERS)
@given(data=st.data(), skips=st.booleans())
@settings(max_examples=30)
def test_text_after_a_prompt_is_what_the_whole_has_more_than_the_prompt(
    kind: str, data: st.DataObject, skips: bool
) -> None:
    tokenizer, backend = make(kind)
    texts = [id_ for id_ in range(backend.get_vocab_size()) if id_ not in tokenizer.token_bytes.single]
    prompt, tokens = (data.draw(st.lists(st.sampled_from(texts), max_size=4)) for _ in range(2))
    before, whole = (backend.decode(ids, skip_special_tokens=skips) for ids in (prompt, prompt + tokens))
    if "\ufffd" not in before + whole:
        assert before + streamed(tokenizer, tokens, skips, tuple(prompt)) == whole


def test_indents_that_are_added_tokens_are_spaces() -> None:
    tokenizer, backend = make("gemma")
    indent = backend.token_to_id("▁▁▁▁")
    assert tokenizer.token_bytes[indent] == b"    "
    assert tokenizer.decode_now([indent, backend.token_to_id("Hi")]) == "    Hi"


def test_a_space_is_dropped_where_a_text_begins_and_nowhere_else() -> None:
    tokenizer, backend = make("llama 2")
    word, end = backend.token_to_id("▁Hi"), backend.token_to_id("<end of text>")
    assert tokenizer.decode_now([end, word], True) == streamed(tokenizer, [end, word], True) == "Hi"
    assert streamed(tokenizer, [word], True, (end,)) == "Hi"
    assert streamed(tokenizer, [word], True, (end, word)) == " Hi"
    assert tokenizer.token_bytes[word] == b" Hi"  # as a name in logprobs, where "Hi" is another token


def test_a_prompt_that_begins_with_part_of_a_character_leaves_nothing_after() -> None:
    tokenizer, backend = make("byte-level")
    symbols = {byte: symbol for symbol, byte in byte_of_symbol().items()}
    first, second = (backend.token_to_id(symbols[byte]) for byte in "é".encode())
    assert streamed(tokenizer, [backend.token_to_id("a")], True, (first, second)) == "a"


def test_single_bytes_are_shown_as_soon_as_they_are_a_character() -> None:
    tokenizer, backend = make("gemma")
    stream = tokenizer.stream()
    parts = [stream.feed(backend.token_to_id(f"<0x{byte:02X}>")) for byte in (*"é😀".encode(), 0xFF, 0x41)]
    assert [*parts, stream.flush()] == ["", "é", "", "", "", "😀", "\ufffd", "\ufffd", ""]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), SPACES]),
        decoders.Sequence([SPACES, decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    ],
    ids=["WordPiece", "BPEDecoder", "CTC", "replaces in the whole", "strips the end", "strips bytes"],
)
def test_decoders_that_cannot_be_streamed_are_refused(decoder: decoders.Decoder) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, [], unk_token="a"))
    backend.decoder = decoder
    with pytest.raises(UnsupportedDecoder, match=r"decoder \['.*'\]: expected byte-level or sentencepiece style"):
        Tokenizer(backend.to_str().encode(), None)
