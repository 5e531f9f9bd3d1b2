"""The bundled model for coding agents, whose prompts have tens of thousands of tokens: it takes them, and an output
ends with its first sentence or indented line. What it says has no sense beyond the length that it was trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer
from tools.attack.client import ROOT

CONTEXT = 65_536


def write_long_model(folder: Path) -> None:
    """Write it to ``folder``, which is made."""
    shutil.copytree(ROOT / "core/engine/bundled", folder)
    config, generation = folder / "config.json", folder / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(tokenizer.get_vocab_size())]
    known = json.loads(generation.read_text())
    # A single line end is part of a tool call.
    ending = (token for token, text in enumerate(texts) if "." in text or ("\n" in text and text != "\n"))
    ends = [known["eos_token_id"], *ending]
    generation.write_text(json.dumps(known | {"eos_token_id": ends}))
