"""A loaded plan predicts what an independent model predicts, and what it stores in its KV format is what it reads."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.kernels import tiny

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine_lab.eval.forward import LoadedPlan

TOKENS = tuple(torch.randint(0, 120, (50,), generator=torch.Generator().manual_seed(3)).tolist())


def loaded(folder, *words, chunk=64):
    plan = assemble([f"model.path={folder}", "device=cpu", "model.dtype=float32", *words])
    return LoadedPlan(plan, bind(plan), context=64, chunk=chunk)


def logits(plan):
    return torch.cat(list(plan.logits(plan.hidden(TOKENS))))


@pytest.fixture
def folder(tmp_path):
    return tiny.write(tmp_path)


def independent(folder):
    """Llama in plain torch: float32 ``[tokens, vocab]``."""
    w = load_file(folder / "model.safetensors")
    x, count = w["model.embed_tokens.weight"][list(TOKENS)], len(TOKENS)
    angles = torch.outer(torch.arange(count).float(), 10000.0 ** -(torch.arange(0, 16, 2) / 16)).repeat(1, 2)

    def turned(y):
        return y * angles.cos() + torch.cat((-y[..., 8:], y[..., :8]), -1) * angles.sin()

    for i in range(3):
        name = f"model.layers.{i}"
        h = F.rms_norm(x, (64,), w[f"{name}.input_layernorm.weight"], 1e-5)
        q, k, v = (
            F.linear(h, w[f"{name}.self_attn.{p}_proj.weight"]).view(count, -1, 16).transpose(0, 1) for p in "qkv"
        )
        k, v = (turned(k).repeat_interleave(2, 0), v.repeat_interleave(2, 0))
        y = F.scaled_dot_product_attention(turned(q), k, v, is_causal=True).transpose(0, 1).flatten(1)
        x = x + F.linear(y, w[f"{name}.self_attn.o_proj.weight"])
        h = F.rms_norm(x, (64,), w[f"{name}.post_attention_layernorm.weight"], 1e-5)
        gate, up = (F.linear(h, w[f"{name}.mlp.{p}_proj.weight"]) for p in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, w[f"{name}.mlp.down_proj.weight"])
    return F.linear(F.rms_norm(x, (64,), w["model.norm.weight"], 1e-5), w["lm_head.weight"])


def test_logits_are_those_of_an_independent_model(folder):
    torch.testing.assert_close(logits(loaded(folder)), independent(folder), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_predict_what_the_whole_window_predicts(folder, chunk):
    torch.testing.assert_close(logits(loaded(folder, chunk=chunk)), logits(loaded(folder)), atol=1e-4, rtol=1e-4)


def test_a_lossy_kv_format_shows_and_a_lossless_one_does_not(folder):
    plain = logits(loaded(folder, "kv_format=native"))
    assert 1e-4 < float((logits(loaded(folder, "kv_format=int8")) - plain).abs().max()) < 0.5


def test_a_second_window_does_not_see_the_first(folder):
    plan = loaded(folder)
    before = logits(plan)
    plan.hidden(tuple(reversed(TOKENS)))
    assert torch.equal(logits(plan), before)
