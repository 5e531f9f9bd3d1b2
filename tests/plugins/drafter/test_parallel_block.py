"""DFlash heads against a float32 implementation of the format's description, written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.kernels import tiny
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.assembly.assemble import assemble
from engine.contracts.drafter import DraftRows, DraftTokens
from engine.contracts.request import EngineRequest, SamplingParams
from engine.startup.build import build_engine
from engine_plugins.drafter.parallel_block import ParallelBlockDrafter, read_facts

HIDDEN, VOCAB, HEADS, KV_HEADS, DIM, MLP, LAYERS = 64, 120, 4, 2, 24, 80, 2
EPS, THETA, MASK = 1e-5, 500.0, 119
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "intermediate_size": MLP,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "block_size": 6,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
}


def head_tensors(draft_vocab: int | None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    tensors = {
        "fc.weight": matrix(HIDDEN, 2 * HIDDEN),
        "hidden_norm.weight": 1 + matrix(HIDDEN),
        "norm.weight": 1 + matrix(HIDDEN),
    }
    for i in range(LAYERS):
        name = f"layers.{i}"
        tensors |= {
            f"{name}.input_layernorm.weight": 1 + matrix(HIDDEN),
            f"{name}.post_attention_layernorm.weight": 1 + matrix(HIDDEN),
            f"{name}.self_attn.q_proj.weight": matrix(HEADS * DIM, HIDDEN),
            f"{name}.self_attn.k_proj.weight": matrix(KV_HEADS * DIM, HIDDEN),
            f"{name}.self_attn.v_proj.weight": matrix(KV_HEADS * DIM, HIDDEN),
            f"{name}.self_attn.q_norm.weight": 1 + matrix(DIM),
            f"{name}.self_attn.k_norm.weight": 1 + matrix(DIM),
            f"{name}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * DIM),
            f"{name}.mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            f"{name}.mlp.up_proj.weight": matrix(MLP, HIDDEN),
            f"{name}.mlp.down_proj.weight": matrix(HIDDEN, MLP),
        }
    if draft_vocab is not None:
        kept = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
        tensors |= {"lm_head.weight": matrix(draft_vocab, HIDDEN), "d2t": kept - torch.arange(draft_vocab)}
    return tensors


def write_head(folder: Path, draft_vocab: int | None = None, **change: Any) -> Path:
    own = {} if draft_vocab is None else {"draft_vocab_size": draft_vocab}
    (folder / "config.json").write_text(json.dumps(CONFIG | own | change))
    save_file(head_tensors(draft_vocab), folder / "model.safetensors")
    return folder


class Described:
    """One block over the whole text at once: keys of the text from fused features, no mask within the block."""

    def __init__(self, tensors: dict[str, Tensor], target: LlamaForCausalLM) -> None:
        self.t, self.target = tensors, target

    def rms(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.t[f"{name}.weight"]

    def heads(self, x: Tensor, name: str, positions: Tensor | None) -> Tensor:
        """``[heads, length, dim]``; normed and turned where there are positions."""
        y = F.linear(x, self.t[f"{name}_proj.weight"]).view(x.shape[0], -1, DIM).transpose(0, 1)
        if positions is None:
            return y
        y = self.rms(y, f"{name}_norm")
        angle = positions[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
        first, second = y.chunk(2, dim=-1)
        return y * torch.cos(angle).repeat(1, 2) + torch.cat((-second, first), -1) * torch.sin(angle).repeat(1, 2)

    def drafts(self, tokens: list[int], count: int) -> Tensor:
        """``count`` tokens after ``tokens``, of which the target has computed all but the last."""
        states = self.target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        seen: list[Tensor] = []
        hook = self.target.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        self.target(torch.tensor([tokens[:-1]]))
        hook.remove()
        fused = self.rms(F.linear(torch.cat((states[1][0], seen[0][0]), -1), self.t["fc.weight"]), "hidden_norm")
        x = self.target.model.embed_tokens.weight[torch.tensor([tokens[-1], *[MASK] * count])]
        text, block = torch.arange(len(tokens) - 1), len(tokens) - 1 + torch.arange(count + 1)
        for i in range(LAYERS):
            name = f"layers.{i}.self_attn"
            normed = self.rms(x, f"layers.{i}.input_layernorm")
            q = self.heads(normed, f"{name}.q", block)
            k = torch.cat((self.heads(fused, f"{name}.k", text), self.heads(normed, f"{name}.k", block)), dim=1)
            v = torch.cat((self.heads(fused, f"{name}.v", None), self.heads(normed, f"{name}.v", None)), dim=1)
            k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=0) for y in (k, v))
            out = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(count + 1, -1)
            x = x + F.linear(out, self.t[f"{name}.o_proj.weight"])
            mlp, normed = f"layers.{i}.mlp", self.rms(x, f"layers.{i}.post_attention_layernorm")
            gated = F.silu(F.linear(normed, self.t[f"{mlp}.gate_proj.weight"])) * F.linear(
                normed, self.t[f"{mlp}.up_proj.weight"]
            )
            x = x + F.linear(gated, self.t[f"{mlp}.down_proj.weight"])
        normed = self.rms(x[1:], "norm")
        if "lm_head.weight" in self.t:
            found = F.linear(normed, self.t["lm_head.weight"]).argmax(-1)
            return found + self.t["d2t"][found]
        return F.linear(normed, self.target.lm_head.weight).argmax(-1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(("draft_vocab", "execution"), [(None, "compile"), (50, "eager")])
@torch.inference_mode()
def test_blocks_are_those_of_the_description(
    draft_vocab: int | None, execution: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = write_head(tmp_path, draft_vocab)
    overrides = ["drafter=parallel_block", f"drafter.path={head}", "drafter.adaptive=false", "drafter.max_width=4"]
    chunked = [
        "scheduler=chunked_prefill",
        "scheduler.token_budget=16",
        "model.dtype=float32",
        "overlap=false",  # no step beyond an end
        f"execution={execution}",
    ]
    engine = build_engine(assemble([f"model.path={target}", "device=cpu", "exporter=[]", *overrides, *chunked]))
    seen: list[tuple[str, int, Tensor]] = []
    drafter = engine.bound.drafter
    assert isinstance(drafter, ParallelBlockDrafter)
    propose = drafter.propose

    def proposing(rows: DraftRows) -> DraftTokens:
        proposed = propose(rows)
        wanted = zip(rows.row_ids.tolist(), rows.positions.tolist(), rows.num_draft_tokens, strict=True)
        for i, (row_id, length, num_draft_tokens) in enumerate(wanted):
            # The whole block counts: a row may have asked for less than the widest of its batch.
            assert num_draft_tokens <= rows.most_draft_tokens
            seen.append((str(row_id), length, proposed.tokens[i].clone()))
        return proposed

    monkeypatch.setattr(drafter, "propose", proposing)
    prompts = [[(7 * i + 3) % VOCAB for i in range(37)], [(5 * i + 1) % VOCAB for i in range(9)]]
    texts = {str(i): list(prompt) for i, prompt in enumerate(prompts)}
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        engine.core.submit(EngineRequest(str(i), tuple(prompt), sampling))
    while engine.core.has_work:
        for output in engine.core.step().outputs:
            texts[output.request_id] += output.tokens
    engine.core.close()
    described = Described(head_tensors(draft_vocab), LlamaForCausalLM.from_pretrained(target, dtype=torch.float32))
    assert {request for request, _, _ in seen} == {"0", "1"} and any(len(tokens) == 4 for _, _, tokens in seen)
    for request, length, tokens in seen:
        wanted = described.drafts(texts[request][: length + 1], len(tokens))
        assert tokens.tolist() == wanted.tolist(), (request, length)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hidden_size": 32}, "hidden_size=32, .* has 64"),
        ({"dflash_config": {"mask_token_id": 120, "target_layer_ids": [0]}}, "mask_token_id=120, .* has 120 tokens"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [3]}}, r"target_layer_ids=\[3\], .* has 3 layers"),
        ({"dflash_config": {"mask_token_id": 1}}, "has no target_layer_ids"),
        ({"block_size": 1}, "block_size=1, expected at least 2"),
        ({"layer_types": ["sliding_attention"]}, "only full attention"),
    ],
)
def test_a_head_for_another_model_is_refused_saying_why(
    change: dict[str, Any], expected: str, target: Path, tmp_path: Path
) -> None:
    folder = write_head(tmp_path, **change)
    with pytest.raises(ValueError, match=expected):
        read_facts(str(folder), assemble([f"model.path={target}", "device=cpu"]).model)
