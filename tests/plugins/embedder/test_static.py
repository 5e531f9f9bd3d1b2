from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.service.fakes import TOKENIZER_JSON, VOCAB, ids

from engine.assembly.model_config import bundled_dir
from engine.testing.context import build_context
from engine.testing.embedder import EmbedderConformance, product
from engine_plugins.embedder.static import MOST_TOKENS, StaticConfig, StaticEmbedder

DIM = 32


def folder(path: Path, dtype: torch.dtype = torch.float32, **more: torch.Tensor) -> Path:
    """As model2vec writes it, with one token for each byte."""
    table = torch.randn(VOCAB, DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    save_file({"embeddings": table, **more}, path / "model.safetensors")
    (path / "tokenizer.json").write_bytes(TOKENIZER_JSON)
    (path / "config.json").write_text(json.dumps({"normalize": True}))
    return path


def make(path: Path | str, **config: str) -> StaticEmbedder:
    return StaticEmbedder(StaticConfig(path=str(path), **config), build_context())


def expected(path: Path, text: str, weights: Sequence[float] | None = None) -> torch.Tensor:
    from safetensors.torch import load_file

    rows = load_file(path / "model.safetensors")["embeddings"].float()[list(ids(text))]
    weighted = rows if weights is None else rows * torch.tensor([weights[token] for token in ids(text)])[:, None]
    return torch.nn.functional.normalize(weighted.mean(0), dim=0)


class TestConformance(EmbedderConformance):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = folder(tmp_path)

    def make(self) -> StaticEmbedder:
        return make(self.folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_vector_is_the_mean_of_those_of_the_tokens(dtype: torch.dtype, tmp_path: Path) -> None:
    embedder = make(folder(tmp_path, dtype))
    found = torch.tensor(embedder.embed("hi you"))
    torch.testing.assert_close(found, expected(tmp_path, "hi you"), atol=1e-6, rtol=1e-6)


def test_tokens_have_weights_where_the_file_has_some(tmp_path: Path) -> None:
    weights = torch.linspace(0.1, 2.0, VOCAB)
    embedder = make(folder(tmp_path, weights=weights))
    found = torch.tensor(embedder.embed("hi you"))
    torch.testing.assert_close(found, expected(tmp_path, "hi you", weights.tolist()), atol=1e-6, rtol=1e-6)


def test_tokens_share_rows_where_the_file_maps_them(tmp_path: Path) -> None:
    mapping = torch.arange(VOCAB)
    mapping[ord("a")] = ord("b")
    embedder = make(folder(tmp_path, mapping=mapping))
    assert list(embedder.embed("a")) == list(embedder.embed("b")) != list(embedder.embed("c"))


def test_what_comes_after_many_tokens_is_not_looked_at(tmp_path: Path) -> None:
    embedder = make(folder(tmp_path))
    assert list(embedder.embed("x" * MOST_TOKENS + "y")) == list(embedder.embed("x" * MOST_TOKENS))


def test_the_input_embeddings_of_a_model_will_do() -> None:
    embedder = make(bundled_dir(), tensor="model.embed_tokens.weight")
    one, two = embedder.embed("How do I open a file?"), embedder.embed("How to open files?")
    assert product(one, two) > product(one, embedder.embed("Why is the sea salty?"))


@pytest.mark.parametrize(
    "config, said",
    [
        ({"path": ""}, r"embedder\.path is empty; name a folder"),
        ({"path": "nowhere"}, r"embedder\.path=nowhere: no such directory"),
        ({"tensor": "words"}, r"expected a tensor 'words' \[vocab_size, dim\]; it has embeddings"),
    ],
)
def test_a_folder_that_lacks_something_is_refused_with_what_it_lacks(
    config: dict[str, str], said: str, tmp_path: Path
) -> None:
    folder(tmp_path)
    with pytest.raises(ValueError, match=said):
        make(**{"path": str(tmp_path), **config})


def test_a_table_of_integers_is_refused(tmp_path: Path) -> None:
    folder(tmp_path)
    save_file({"embeddings": torch.zeros(VOCAB, DIM, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="embeddings is I8; supported: F16, F32"):
        make(tmp_path)
