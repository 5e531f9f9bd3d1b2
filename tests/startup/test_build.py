"""Plans that bind but cannot run are refused while the engine is built, with the plugin's name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.assembly.assemble import assemble
from engine.assembly.bind import bind
from engine.checkpoint.files import CheckpointError
from engine.contracts.drafter import DrafterKV
from engine.contracts.graph import KVSpec
from engine.startup.build import build_engine
from engine.startup.checks import check_attention, check_drafter
from engine.startup.memory.budget import DoesNotFit
from engine_plugins.attention_kernel.torch_paged import TorchAttention
from engine_plugins.drafter.early_exit import EarlyExitDrafter
from tests.selection import few

from ..kernels import tiny


def test_a_drafter_that_needs_what_the_model_lacks_is_refused_by_name() -> None:
    plan = assemble(["model.path=bundled", "device=cpu", "drafter=early_exit", "attention_kernel=torch"])
    bound = bind(plan)
    check_drafter(plan, bound)
    assert isinstance(bound.drafter, EarlyExitDrafter)
    bound.drafter.aux_layers = (2, 7)
    bound.drafter.kv = DrafterKV(shared_layers=7)
    why = "aux_layer 7; .*states 0 to 6, and it needs the first 7 layers; the model has 6"
    with pytest.raises(DoesNotFit, match=f"drafter=early_exit .*{why}"):
        check_drafter(plan, bound)
    bound.drafter.aux_layers, bound.drafter.kv = (), DrafterKV((KVSpec(1, 48),))
    kernel = bound.attention_kernel
    kernel.capabilities = replace(kernel.capabilities, head_dims=(64, 128))
    why = r"needs head_dim 48; attention_kernel=torch supports 64, 128 \(.*drafter\.max_width=0"
    with pytest.raises(DoesNotFit, match=why):
        check_drafter(plan, bound)


def test_attention_that_the_kernel_lacks_is_refused_by_name() -> None:
    plan = assemble(["model.path=bundled", "device=cpu", "attention_kernel=torch"])
    bound, (op, *_) = bind(plan), plan.model.attentions
    kernel = bound.attention_kernel
    chunked = replace(plan, model=replace(plan.model, attentions=(op, replace(op, chunk=64), replace(op, window=64))))
    check_attention(chunked, bound)
    wide = replace(plan, model=replace(plan.model, attentions=(op, replace(op, num_heads=4 * op.num_heads))))
    check_attention(wide, bound)
    group = op.num_heads // op.num_kv_heads
    kernel.capabilities = replace(kernel.capabilities, heads_per_kv_head=group)
    why = f"{group}, {4 * group} query heads that share a key-value head, it needs as many in all layers"
    with pytest.raises(DoesNotFit, match=why):
        check_attention(wide, bound)
    kernel.capabilities = replace(kernel.capabilities, chunk=False, window=False)
    check_attention(plan, bound)
    why = "attention_kernel=torch cannot run this model: sliding-window layers; layers with chunked attention"
    with pytest.raises(DoesNotFit, match=why):
        check_attention(chunked, bound)


def test_a_draft_model_whose_heads_the_attention_kernel_cannot_group_is_refused_by_name(tmp_path: Path) -> None:
    """Two query heads share a key-value head in both models; the kernel is built for four."""
    path = tiny.write(tmp_path)
    model = [f"model.path={path}", "drafter=draft_model", f"drafter.path={path}"]
    plan = assemble([*model, "device=cpu", "threads=1", "exporter=[]", "attention_kernel=torch", "execution=eager"])
    kernel = bind(plan).attention_kernel
    for ratio in (2, 4):
        able = replace(kernel.capabilities, heads_per_kv_head=ratio)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TorchAttention, "capabilities", able)
            if ratio == 2:
                build_engine(plan).core.close()
                continue
            with pytest.raises(DoesNotFit, match=r"drafter=draft_model: drafter.path=\S+: 2 query heads .* expected 4"):
                build_engine(plan)


@few(3)
@pytest.mark.parametrize("quantizer", ["checkpoint", "int8"])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "model.embed_tokens.weight",
    ],
)
def test_a_weight_that_is_no_number_is_named_and_no_plugin_blamed(name: str, quantizer: str, tmp_path: Path) -> None:
    """Layers that are looked at while they are packed, and all others when the first request fails."""
    tensors = {each: tensor for each, tensor in tiny.weights().items() if each != "lm_head.weight"}
    tensors[name].view(-1)[3] = float("nan")
    path = tiny.write(tmp_path, tensors, tie_word_embeddings=True)
    overrides = ("device=cpu", "threads=1", "exporter=[]", "execution=eager", f"quantizer={quantizer}")
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor '{name}' holds NaN or infinity \(1 of"):
        build_engine(assemble([f"model.path={path}", *overrides]))
