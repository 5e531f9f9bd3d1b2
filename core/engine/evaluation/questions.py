"""Questions with known answers, asked greedily through :class:`engine.LLM`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.evaluation.plans import Contestant
from engine.evaluation.windows import json_lines
from engine.serving.chat_template import TemplateFailed
from engine.serving.offline import LLM


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

    Raises ``ValueError`` naming the line that is wrong.
    """
    found = []
    for where, line in json_lines(path, "--questions"):
        unknown = sorted(line.keys() - {"question", "messages", "answer"})
        if unknown:
            raise ValueError(f"{where}: unknown key {', '.join(unknown)}; expected question or messages, and answer")
        if ("question" in line) == ("messages" in line):
            raise ValueError(f"{where}: expected either question or messages")
        if not isinstance(line.get("answer"), str) or not line["answer"].strip():
            raise ValueError(f"{where}: expected the text of an answer")
        found.append(Question(_messages(where, line), line["answer"]))
    return found


def _messages(where: str, line: dict[str, Any]) -> tuple[dict[str, str], ...]:
    if "question" in line:
        if not isinstance(line["question"], str):
            raise ValueError(f"{where}: question is a {type(line['question']).__name__}, expected text")
        return ({"role": "user", "content": line["question"]},)
    messages = line["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError(f"{where}: expected messages to be a list of objects with the texts role and content")
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


def ask(
    contestant: Contestant, questions: Sequence[Question], match: str, answer_tokens: int, config_dirs: Sequence[Path]
) -> Answers:
    """All questions in one batch, greedily; ``match`` is one of :data:`engine.evaluation.options.MATCHES`.

    Raises ``ValueError`` for a conversation that the model's chat template refuses.
    """
    # On one thread: on a CPU, a second one that computes would compete with the first one's workers.
    llm = LLM(contestant.plan.settings.model.path, [*contestant.overrides, "overlap=false"], config_dirs)
    try:
        try:
            prompts = [llm.tokenizer.encode_chat_now(list(question.messages)) for question in questions]
        except TemplateFailed as error:
            name = contestant.plan.model.name
            raise ValueError(f"the chat template of {name} refuses a question: {error}") from error
        done = llm.generate(prompts, max_tokens=answer_tokens, temperature=0.0)
    finally:
        llm.close()
    right = sum(matches(got.text, wanted.answer, match) for got, wanted in zip(done, questions, strict=True))
    return Answers(right, len(questions))


def matches(text: str, answer: str, match: str) -> bool:
    """Whether an answer is as expected; runs of white space count as one space."""
    got, wanted = " ".join(text.split()), " ".join(answer.split())
    return got.startswith(wanted) if match == "begins" else got == wanted
