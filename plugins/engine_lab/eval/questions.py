"""Questions with known answers, asked greedily through :class:`engine.LLM`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.service.chat_template import TemplateFailed
from engine.service.errors import ApiError
from engine.service.offline import LLM
from engine.service.parsing import parse_messages
from engine.service.tokenizer import Tokenizer
from engine_lab.eval.plans import Contestant
from engine_lab.eval.windows import json_lines
from engine_lab.shared.errors import EvalError


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation and what the model should answer."""

    messages: tuple[dict[str, str], ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Answers:
    """How many questions were answered as expected."""

    right: int
    total: int

    @property
    def share(self) -> float:
        return self.right / self.total


def read_questions(path: str) -> list[Question]:
    """Lines of ``{"question": ..., "answer": ...}`` or ``{"messages": [...], "answer": ...}``.

    Raises :class:`EvalError` naming the line that is wrong.
    """
    found = []
    for where, line in json_lines(path, "--questions"):
        unknown = sorted(line.keys() - {"question", "messages", "answer"})
        if unknown:
            raise EvalError(f"{where}: unknown key {', '.join(unknown)}; expected question or messages, and answer")
        if ("question" in line) == ("messages" in line):
            raise EvalError(f"{where}: expected either question or messages")
        if not isinstance(line.get("answer"), str) or not line["answer"].strip():
            raise EvalError(f"{where}: expected the text of an answer")
        found.append(Question(messages_of(where, line), line["answer"]))
    return found


def messages_of(where: str, line: dict[str, Any]) -> tuple[dict[str, str], ...]:
    """The conversation of a line with either ``question`` or ``messages``. Raises :class:`EvalError`."""
    if "question" in line:
        if not isinstance(line["question"], str):
            raise EvalError(f"{where}: question is a {type(line['question']).__name__}, expected text")
        return ({"role": "user", "content": line["question"]},)
    messages = line["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise EvalError(f"{where}: expected messages to be a list of objects with the texts role and content")
    return tuple(messages)


def _is_message(value: Any) -> bool:
    is_object = isinstance(value, dict) and value.keys() == {"role", "content"}
    return is_object and all(isinstance(text, str) for text in value.values())


def recall_questions(folder: Path) -> list[Question]:
    """The questions of ``recall.json`` beside the bundled model; answers should begin with what it lists."""
    recall = json.loads((folder / "recall.json").read_text(encoding="utf-8"))
    return [
        Question(({"role": "user", "content": recall["question"].format(name=name)},), sentence)
        for name, sentence in recall["first_sentences"].items()
    ]


def check_questions(questions: Sequence[Question], tokenizer: Tokenizer, model: str, max_len: int) -> None:
    """Raise :class:`EvalError` for questions that the model's chat template refuses, or that leave no room for an
    answer in ``max_len`` tokens."""
    for number, question in enumerate(questions, 1):
        tokens = _prompt(question, tokenizer, model, number)
        if len(tokens) >= max_len:
            raise EvalError(
                f"--questions: question {number} has {len(tokens)} tokens, and {model} serves model.max_len={max_len} "
                "with the answer: set that larger, or leave the question out"
            )


def ask(
    contestant: Contestant, questions: Sequence[Question], match: str, answer_tokens: int, config_dirs: Sequence[Path]
) -> Answers:
    """All questions in one batch, greedily; ``match`` is one of :data:`engine_lab.eval.options.MATCHES`.

    Raises :class:`EvalError` for a conversation that the model's chat template refuses.
    """
    # On one thread: on a CPU, a second one that computes would compete with the first one's workers.
    llm = LLM(contestant.plan.settings.model.path, [*contestant.overrides, "overlap=false"], config_dirs)
    name = contestant.plan.model.name
    try:
        prompts = [_prompt(question, llm.tokenizer, name, i) for i, question in enumerate(questions, 1)]
        done = llm.generate(prompts, max_tokens=answer_tokens, temperature=0.0)
    finally:
        llm.close()
    right = sum(matches(got.text, wanted.answer, match) for got, wanted in zip(done, questions, strict=True))
    return Answers(right, len(questions))


def _prompt(question: Question, tokenizer: Tokenizer, model: str, number: int) -> tuple[int, ...]:
    """``number``: from 1, for messages."""
    if tokenizer.template is None:
        raise EvalError(f"--questions: {model} has no chat template to ask with; give --text or --jsonl")
    try:
        return tokenizer.encode_chat_now(parse_messages(question.messages))
    except (TemplateFailed, ApiError) as error:
        raise EvalError(f"--questions: the chat template of {model} refuses question {number}: {error}") from error


def matches(text: str, answer: str, match: str) -> bool:
    """Whether an answer is as expected; runs of white space count as one space."""
    got, wanted = " ".join(text.split()), " ".join(answer.split())
    return got.startswith(wanted) if match == "begins" else got == wanted
