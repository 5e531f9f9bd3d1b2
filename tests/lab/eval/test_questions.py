"""Questions are read strictly and answers are compared as stated."""

import json

import pytest

from engine_lab.eval.questions import Question, matches, read_questions


def written(tmp_path, *lines):
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


def test_a_question_is_a_conversation_of_one_message(tmp_path):
    talk = [{"role": "system", "content": "Brief."}, {"role": "user", "content": "b?"}]
    path = written(tmp_path, {"question": "a?", "answer": "A"}, {"messages": talk, "answer": "B"})
    assert read_questions(path) == [
        Question(({"role": "user", "content": "a?"},), "A"),
        Question(tuple(talk), "B"),
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"answer": "a"}, "either question or messages"),
        ({"question": "q", "messages": [], "answer": "a"}, "either question or messages"),
        ({"question": "q"}, "text of an answer"),
        ({"question": "q", "answer": " "}, "text of an answer"),
        ({"question": 1, "answer": "a"}, "question is a int"),
        ({"messages": [{"role": "user"}], "answer": "a"}, "list of objects"),
        ({"question": "q", "answer": "a", "id": 3}, "unknown key id"),
    ],
)
def test_a_bad_question_is_named(tmp_path, line, says):
    with pytest.raises(ValueError, match=f"line 1: .*{says}"):
        read_questions(written(tmp_path, line))


def test_white_space_does_not_count_and_everything_else_does():
    assert matches(" a\n b", "a b", "exact") and not matches("a b.", "a b", "exact")
    assert matches("a b.", "a b", "begins") and not matches("A b", "a b", "begins")
