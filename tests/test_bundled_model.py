"""The bundled model is what its model card says it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine import LLM
from engine.assembly.model_facts import model_facts

MAX_BYTES = 20 * 1024 * 1024


def folder() -> Path:
    return Path(model_facts("bundled").path)


def normalised(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """Greedy answers to the canonical question about the entries drawn with seed 0."""
    names = list(json.loads((folder() / "recall.json").read_text())["first_sentences"])
    llm = LLM("bundled", overrides=["device=cpu", "+preset=throughput", "model.max_len=512", "exporter=[]"])
    prompts = [llm.tokenizer.encode_chat_now([{"role": "user", "content": f"What does {name} do?"}]) for name in names]
    done = llm.generate(prompts, max_tokens=64, temperature=0.0)
    llm.close()
    return {name: completion.text for name, completion in zip(names, done, strict=True)}


def test_greedy_answers_reproduce_the_first_sentence_of_the_docstring(answers: dict[str, str]) -> None:
    expected = json.loads((folder() / "recall.json").read_text())["first_sentences"]
    assert len(expected) == 200
    right = sum(normalised(answers[name]).startswith(normalised(expected[name])) for name in expected)
    assert right >= 0.8 * len(expected), f"{right} of {len(expected)}"


def test_the_weights_fit_the_package_and_the_card_names_data_and_licence() -> None:
    assert (folder() / "model.safetensors").stat().st_size <= MAX_BYTES
    card = (folder() / "MODEL_CARD.md").read_text()
    assert "PSF" in card and "recall" in card.lower()
