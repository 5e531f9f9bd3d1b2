"""``tools/quantize`` on families of other shapes than Llama's: what it folds, and what it writes."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.plugins.architecture import test_dense_families as dense  # noqa: E402
from tests.plugins.architecture import test_families_with_experts as sparse  # noqa: E402
from tests.plugins.architecture import test_nested_families as nested  # noqa: E402
from tests.plugins.architecture.family import written_once  # noqa: E402, F401
from tests.selection import few  # noqa: E402
from tests.tools.test_quantize import dequantized  # noqa: E402
from tools.benchmarks.families import PROMPT, difference, planned_logits  # noqa: E402
from tools.quantize.__main__ import main as quantize  # noqa: E402
from tools.quantize.calibration import LayerRunner  # noqa: E402
from tools.quantize.folding import sites  # noqa: E402
from tools.quantize.run import load_source, norm_names  # noqa: E402

from engine.assembly.bind import bind  # noqa: E402

LARGEST = 1e-5
"""Accepted difference as a share of the largest logit: what the order of float32 sums makes."""
FOLDED = {
    "cohere": (dense.TestCohere(), "o_proj down_proj"),  # attention and feed-forward network read one norm
    "gemma2": (nested.TestGemma(), "q_proj o_proj gate_proj down_proj"),  # norms are stored less 1
    "gpt_oss": (sparse.TestGptOss(), "q_proj o_proj"),  # sinks in attention, experts
    "olmo2": (dense.TestOlmo(), "o_proj down_proj"),  # norms after linear layers
    "phi3": (dense.TestPhi3(), "qkv_proj o_proj gate_up_proj down_proj"),  # projections fused in the checkpoint
    "deepseek_v2": (sparse.TestDeepSeek(), "q_b_proj gate_proj down_proj"),  # attention to latents
    "starcoder2": (dense.TestStarcoder2(), "o_proj"),  # norms with biases, no gates
}
"""Suite, and the first parts of the linear layers of its first layer that take scales."""


@few(3)
@pytest.mark.parametrize("name", FOLDED)
def test_scales_fold_where_that_changes_nothing_and_nowhere_else(name):
    suite, expected = FOLDED[name]
    with suite.checkpoint(name) as (model, _, _), torch.inference_mode():
        tokens = tuple(token % model.vocab_size for token in PROMPT)
        source, generator = load_source(str(model.path), "cpu"), torch.Generator().manual_seed(0)
        kv_format = bind(source.plan).kv_format
        runner = LayerRunner(source.plan.model, source.model, kv_format, [tokens], "float32", "cpu")
        for index, block in enumerate(source.graph.layers):
            norms = {norm: source.checkpoint.read(norm) for norm in norm_names(block)}
            found = sites(source.graph, block, source.linears, norms)
            if index == 0:
                parts = (block.nodes[node].op.spec.parts[0].name.rpartition(".")[2] for node in found)
                assert " ".join(parts) == expected
            for site in found.values():
                wanted = site.share(torch.rand(site.linear.spec.in_features, generator=generator) + 0.5)
                site.linear.weight = site.linear.weight * site.fold(wanted)
        for index in range(len(source.graph.layers)):
            runner.advance(index, slice(None))
        got = source.model.head(runner._exact[0][source.graph.hidden])
        want = planned_logits(tokens, len(tokens), f"model.path={model.path}")
        assert difference(got, want) < LARGEST


def test_a_head_of_a_nested_model_is_untied(tmp_path):
    out = tmp_path / "out"
    with nested.TestGemma().checkpoint("gemma3 that sees") as (model, graph, _):
        assert graph.lm_head.tied
        assert quantize([str(model.path), str(out), "--method", "fp8", "--head", "int8", "--device", "cpu"]) == 0
        tokens = tuple(token % model.vocab_size for token in PROMPT)
        got, want = (planned_logits(tokens, len(tokens), f"model.path={path}") for path in (out, model.path))
        assert 0 < difference(got, want) < 0.2


@few(3)
@pytest.mark.parametrize("name", [*FOLDED, "gemma3 that sees"])
def test_the_engine_computes_what_the_written_numbers_stand_for(name, tmp_path):
    suite = nested.TestGemma() if name == "gemma3 that sees" else FOLDED[name][0]
    out, plain = tmp_path / "out", tmp_path / "plain"
    with suite.checkpoint(name) as (model, _, _):
        assert quantize([str(model.path), str(out), "--method", "fp8", "--device", "cpu"]) == 0
        plain.mkdir()
        (plain / "config.json").write_text((Path(model.path) / "config.json").read_text())
        tensors = {key: tensor.contiguous() for key, tensor in dequantized(out).items()}
        save_file(tensors, plain / "model.safetensors")
        tokens = tuple(token % model.vocab_size for token in PROMPT)
        got, want, exact = (
            planned_logits(tokens, len(tokens), f"model.path={path}", *words)
            for path, words in ((out, ["quantizer.activations=bf16"]), (plain, []), (model.path, []))
        )
        assert difference(got, want) < LARGEST < difference(got, exact)
