from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools import compare_tokenizers

from engine.service.tokenizer import Tokenizer

from ..service.fakes import TEMPLATE, TOKENIZER_JSON


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER_JSON)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return tmp_path


def test_there_are_texts_of_every_sort() -> None:
    made = list(compare_tokenizers.texts(compare_tokenizers.random.Random(0), 2000, ["<|end|>"]))
    whole = "".join(made)
    assert len(made) == 2000
    assert all(
        part in whole for part in ("\u200d", "\x00", "\x1f", "שלום", "世界", "\n" + " " * 39, "\t\t\t", "<|end|>")
    )
    assert made == list(compare_tokenizers.texts(compare_tokenizers.random.Random(0), 2000, ["<|end|>"]))


def test_a_tokenizer_is_compared_and_a_difference_is_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare_tokenizers.main([str(folder), "--texts", "50"]) == 0
    assert f"| {folder.name} | 0 | 0 | 0 | 0 | 0 |" in capsys.readouterr().out
    monkeypatch.setattr(Tokenizer, "decode_now", lambda self, tokens, skips=False: "")
    assert compare_tokenizers.main([str(folder), "--texts", "50", "--show", "1"]) == 1
    assert "found    ''" in capsys.readouterr().out
