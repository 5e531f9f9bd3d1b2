"""The bundled model is what its model card says it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine import LLM
from engine.service.turns import Conversation, Turn
from tests.families import model_facts

MAX_BYTES = 20 * 1024 * 1024


def folder() -> Path:
    return Path(model_facts("bundled").path)


def normalised(text: str) -> str:
    return " ".join(text.split())


def answers(names: list[str]) -> dict[str, str]:
    """Greedy answers to the canonical question about these entries."""
    llm = LLM("bundled", overrides=["device=cpu", "+preset=throughput", "model.max_len=512", "exporter=[]"])
    prompts = [llm.tokenizer.encode_chat_now(Conversation((Turn("user", f"What does {name} do?"),))) for name in names]
    done = llm.generate(prompts, max_tokens=64, temperature=0.0)
    llm.close()
    return {name: completion.text for name, completion in zip(names, done, strict=True)}


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_greedy_answers_reproduce_the_first_sentence_of_the_docstring(every: int) -> None:
    expected = json.loads((folder() / "recall.json").read_text())["first_sentences"]
    assert len(expected) == 200, "drawn with seed 0"
    found = answers(list(expected)[::every])
    right = sum(normalised(text).startswith(normalised(expected[name])) for name, text in found.items())
    assert right >= 0.8 * len(found), f"{right} of {len(found)}"


def test_the_weights_fit_the_package_and_the_card_names_data_and_licence() -> None:
    assert (folder() / "model.safetensors").stat().st_size <= MAX_BYTES
    card = (folder() / "MODEL_CARD.md").read_text()
    assert "PSF" in card and "recall" in card.lower()
