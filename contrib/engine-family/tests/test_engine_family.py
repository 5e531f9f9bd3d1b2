"""Apertus computes what transformers does, refuses what it does not compute, and is served."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_family import FAMILY, ApertusArchitecture
from transformers import ApertusConfig, ApertusForCausalLM

import engine
from engine import LLM
from engine.contracts.config import SlotConfig
from engine.contracts.model import ModelConfig
from engine.testing.architecture import ArchitectureConformance

TINY: dict[str, Any] = {
    "architectures": [FAMILY], "model_type": "apertus", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
PROMPT = tuple(range(100, 140))
SERVED = ("device=cpu", "threads=1", "model.dtype=float32", "exporter=[]", "kv_allocator.block_size=8")


class TestApertus(ArchitectureConformance):
    kernels = ("reference", "torch", "native")

    def make(self) -> ApertusArchitecture:
        return ApertusArchitecture(SlotConfig())

    def models(self) -> Mapping[str, Mapping[str, Any]]:
        return {
            "apertus": TINY,
            "apertus with biases": TINY | {
                "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": None,
                "rope_parameters": YARN,
            },
        }  # fmt: skip

    def reference(self, model: ModelConfig) -> Any:
        return ApertusForCausalLM._from_config(ApertusConfig(**model.raw), attn_implementation="eager")


def described(**changes: Any) -> Any:
    class Changed(TestApertus):
        def models(self) -> Mapping[str, Mapping[str, Any]]:
            return {"changed": {**TINY, **changes}}

    return Changed().described("changed")[1]


def test_what_the_configuration_leaves_out_is_as_transformers_has_it() -> None:
    theirs = ApertusConfig(num_hidden_layers=2).to_dict() | {"architectures": [FAMILY]}
    few = dict.fromkeys(TINY) | {"architectures": [FAMILY], "num_hidden_layers": 2}
    given = {key: value for key, value in few.items() if value is not None}
    suite = TestApertus()
    suite.models = lambda: {"given": given, "whole": theirs}  # type: ignore[method-assign]
    assert suite.described("given")[1] == suite.described("whole")[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act='silu': expected 'xielu'"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types=.*: expected None"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope type 'spiral': expected one of default"),
    ],
)
def test_what_it_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        described(**changes)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an installer leaves beside the module, which conftest.py has made importable."""
    info = tmp_path / "installed" / "engine_family-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-family\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[engine.plugins.v1]\nfamily = engine_family\n")
    monkeypatch.syspath_prepend(str(info.parent))
    importlib.invalidate_caches()


def test_it_is_found_for_a_checkpoint_and_served(installed: None, tmp_path: Path) -> None:
    """Whole engine, tokenizer included; no setting names the plugin."""
    bundled, folder = Path(engine.__file__).parent / "bundled", tmp_path / "apertus"
    torch.manual_seed(0)
    model = ApertusForCausalLM(ApertusConfig(**TINY | {"vocab_size": 8192})).eval()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, folder)
    llm = LLM(str(folder), overrides=SERVED)
    try:
        assert llm.plan.choice("architecture").name == "apertus"
        assert "torch_function: torch function xielu, unfused" in llm.info.lowering
        (answer,) = llm.generate([PROMPT], max_tokens=8, temperature=0.0, ignore_eos=True)
    finally:
        llm.close()
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *answer.tokens]])).logits[0]
    assert answer.text and answer.tokens == tuple(logits.argmax(dim=-1).tolist()[len(PROMPT) - 1 : -1])
