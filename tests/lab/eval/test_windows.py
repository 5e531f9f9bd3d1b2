"""Text and JSON lines as windows: every token is scored once, and bad input is named."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_lab.eval.windows import Window, json_lines, limited, read_prompts, read_text, text_windows

BEGIN = 256


def encode(text, add_special_tokens=True):
    return list(text.encode())


def encode_with_begin(text, add_special_tokens=True):
    return [BEGIN] * add_special_tokens + encode(text)


@given(st.integers(2, 90), st.integers(2, 40), st.data())
def test_every_token_but_unseen_beginnings_is_scored_once(count, context, data):
    stride = data.draw(st.integers(1, context))
    tokens = tuple(range(count))
    scored = []
    for window in text_windows(tokens, context, stride):
        assert len(window.tokens) <= context and window.first >= 1
        scored += window.tokens[window.first :]
    starts = set(range(0, count, stride)) if stride == context else {0}
    assert scored == [token for token in tokens if token not in starts]


def test_overlapping_windows_give_every_scored_token_the_context_that_was_asked_for():
    windows = list(text_windows(range(100), 20, 5))
    assert all(window.first >= 15 for window in windows[1:])


@given(st.integers(1, 200))
def test_a_limit_cuts_to_the_token(most):
    windows = list(text_windows(range(130), 16, 16))
    assert sum(window.scored for window in limited(windows, most)) == min(most, sum(w.scored for w in windows))


def test_only_a_completion_is_scored(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps({"prompt": "abc", "completion": "de"}) + "\n\n" + json.dumps({"prompt": "xy"}))
    assert read_prompts(str(file), encode, 10, 10) == [Window(tuple(b"abcde"), 3), Window(tuple(b"xy"), 1)]


def test_a_completion_goes_on_where_the_prompt_ended(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps({"prompt": "abc", "completion": "de"}))
    assert read_prompts(str(file), encode_with_begin, 10, 10) == [Window((BEGIN, *b"abcde"), 4)]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_a_line_ends_where_json_lines_end(tmp_path, separator):
    file = tmp_path / "lines.jsonl"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in (f"a{separator}b", "cd")]
    file.write_text("\r\n".join(lines), encoding="utf-8", newline="")
    assert [line["prompt"] for _, line in json_lines(str(file), "--jsonl")] == [f"a{separator}b", "cd"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "expected a JSON object"),
        ('{"text": "a"}', "lacks prompt; expected prompt, completion"),
        ('{"prompt": "a", "answer": "b"}', "unknown key answer"),
        ('{"prompt": 3}', "prompt is a int"),
        ('{"prompt": "a", "completion": ""}', "empty prompt or completion"),
        ('{"prompt": "aaaaaaaa", "completion": "bbb"}', "more than --context 10"),
        ('{"prompt": "a"}', "no line has two tokens"),
        ("", "expected some text"),
        ("[" * 100_000, "line 1: not JSON"),
        ('{"prompt": "\\ud800"}', "line 1: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, says):
    file = tmp_path / "lines.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError, match=says):
        read_prompts(str(file), encode, 10, 10)


@pytest.mark.parametrize(("content", "says"), [(b"", "found none"), (b"a", "at least 2"), (b"\xff\xfe", "UTF-8")])
def test_a_text_without_two_tokens_is_refused(tmp_path, content, says):
    file = tmp_path / "text"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=says):
        read_text(str(file), encode, 10, 10)


def test_a_byte_order_mark_is_no_text_and_line_ends_of_windows_are_line_ends(tmp_path):
    plain, marked = tmp_path / "plain", tmp_path / "marked"
    plain.write_bytes(b"ab\ncd")
    marked.write_bytes(b"\xef\xbb\xbfab\r\ncd")
    assert read_text(str(marked), encode, 10, 10) == read_text(str(plain), encode, 10, 10)
    marked.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "ab"}\r\n')
    assert read_prompts(str(marked), encode, 10, 10) == [Window(tuple(b"ab"), 1)]


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.txt"):
        read_text(str(tmp_path / "nowhere.txt"), encode, 10, 10)
