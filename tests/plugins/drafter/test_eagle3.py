"""EAGLE3 heads in every public layout against a float32 implementation of the paper (arXiv:2503.01840)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.kernels import tiny
from tests.selection import few
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.assembly.assemble import assemble
from engine.contracts.drafter import DraftRows, DraftTokens
from engine.contracts.model import ModelFacts
from engine.contracts.request import EngineRequest, SamplingParams
from engine.startup.build import build_engine
from engine.startup.memory.budget import DoesNotFit
from engine.testing.context import build_context
from engine_plugins.drafter.config import Eagle3Config
from engine_plugins.drafter.eagle3.checkpoint import read_facts
from engine_plugins.drafter.eagle3.drafter import Eagle3Drafter, Eagle3Head

HIDDEN, VOCAB, DRAFT_VOCAB, HEADS, KV_HEADS, DIM, MLP = 64, 120, 50, 4, 2, 16, 80
EPS, THETA = 1e-5, 500.0

LAYER = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
}
PUBLISHED = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
LAYOUTS: dict[str, dict[str, Any]] = {
    "authors": PUBLISHED,
    "specforge": PUBLISHED | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "head_dim": 24},
    "eagle 3.1": PUBLISHED | {"fc_norm": True, "norm_output": True},
    "whole vocabulary": {key: value for key, value in PUBLISHED.items() if key != "draft_vocab_size"},
    "speculators": {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [0, 2, 3],
        "transformer_layer_config": LAYER,
    },
    "speculators, two Qwen3 layers": {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "transformer_layer_config": LAYER | {"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 32},
    },
}
AUX_LAYERS = {
    "authors": (2, 1, 0),
    "specforge": (1, 2, 3),
    "eagle 3.1": (2, 1, 0),
    "whole vocabulary": (2, 1, 0),
    "speculators": (0, 2, 3),
    "speculators, two Qwen3 layers": (1, 2, 3),
}


def head_tensors(layout: str) -> dict[str, Tensor]:
    """Random weights under the layout's names."""
    config = LAYOUTS[layout]
    layer = config.get("transformer_layer_config", config)
    by_speculators, dim = "transformer_layer_config" in config, layer.get("head_dim", DIM)
    draft_vocab = config.get("draft_vocab_size", VOCAB)
    generator = torch.Generator().manual_seed(len(layout))

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    tensors = {
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "norm.weight": 1 + matrix(HIDDEN),
        "lm_head.weight": matrix(draft_vocab, HIDDEN),
    }
    if "draft_vocab_size" in config:
        kept = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": 1 + matrix(HIDDEN) for i in range(3)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + matrix(3 * HIDDEN)
    if layout == "speculators":
        tensors["embed_tokens.weight"] = matrix(VOCAB, HIDDEN)
    for i in range(layer["num_hidden_layers"]):
        name = f"layers.{i}" if by_speculators else "midlayer"
        wide = 2 * HIDDEN if i == 0 else HIDDEN
        tensors |= {
            f"{name}.input_layernorm.weight": 1 + matrix(HIDDEN),
            f"{name}.post_attention_layernorm.weight": 1 + matrix(HIDDEN),
            f"{name}.self_attn.q_proj.weight": matrix(HEADS * dim, wide),
            f"{name}.self_attn.k_proj.weight": matrix(KV_HEADS * dim, wide),
            f"{name}.self_attn.v_proj.weight": matrix(KV_HEADS * dim, wide),
            f"{name}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * dim),
            f"{name}.mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            f"{name}.mlp.up_proj.weight": matrix(MLP, HIDDEN),
            f"{name}.mlp.down_proj.weight": matrix(HIDDEN, MLP),
        }
        if i == 0:
            tensors[f"{name}.hidden_norm.weight"] = 1 + matrix(HIDDEN)
        if layer["model_type"] == "qwen3":
            tensors |= {f"{name}.self_attn.{part}_norm.weight": 1 + matrix(dim) for part in "qk"}
    return tensors


class Paper:
    """The head over a whole sequence at once, from the paper and the formats' descriptions."""

    def __init__(self, layout: str, tensors: dict[str, Tensor], target: LlamaForCausalLM) -> None:
        self.config = LAYOUTS[layout]
        self.layer = self.config.get("transformer_layer_config", self.config)
        self.t = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        self.dim = self.layer.get("head_dim", DIM)
        self.aux_layers, self.target = AUX_LAYERS[layout], target
        self.embedding = self.t.get("embed_tokens.weight", target.model.embed_tokens.weight)

    def rms(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.t[f"{name}.weight"]

    def attend(self, x: Tensor, name: str) -> Tensor:
        length = x.shape[0]
        q, k, v = (
            F.linear(x, self.t[f"{name}.{part}_proj.weight"]).view(length, -1, self.dim).transpose(0, 1)
            for part in "qkv"
        )
        if f"{name}.q_norm.weight" in self.t:
            q, k = self.rms(q, f"{name}.q_norm"), self.rms(k, f"{name}.k_norm")
        angle = torch.arange(length)[:, None] * THETA ** (-torch.arange(0, self.dim, 2) / self.dim)
        cos, sin = (f(angle).repeat(1, 2) for f in (torch.cos, torch.sin))

        def turned(y: Tensor) -> Tensor:
            first, second = y.chunk(2, dim=-1)
            return y * cos + torch.cat((-second, first), dim=-1) * sin

        k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=0) for y in (turned(k), v))
        out = F.scaled_dot_product_attention(turned(q), k, v, is_causal=True)
        return F.linear(out.transpose(0, 1).reshape(length, -1), self.t[f"{name}.o_proj.weight"])

    def fuse(self, tokens: list[int]) -> Tensor:
        found = self.target(torch.tensor([tokens]), output_hidden_states=True)
        # transformers puts the final norm on the last one: taken before it here.
        states = [*found.hidden_states[:-1], self.before_norm]
        aux_layers = [states[aux_layer][0] for aux_layer in self.aux_layers]
        if self.config.get("fc_norm"):
            aux_layers = [self.rms(aux_layer, f"fc_norm.{i}") for i, aux_layer in enumerate(aux_layers)]
        together = torch.cat(aux_layers, dim=-1)
        return F.linear(
            self.rms(together, "input_norm") if self.config.get("norm_before_fc") else together, self.t["fc.weight"]
        )

    def chain(self, tokens: list[int], steps: int) -> list[Tensor]:
        """Logits of ``steps`` drafts after ``tokens``, of which the target has computed all but the last."""
        hook = self.target.model.norm.register_forward_pre_hook(
            lambda module, args: setattr(self, "before_norm", args[0])
        )
        g = self.fuse(tokens[:-1])
        hook.remove()
        following, logits = tokens[1:], []
        for _ in range(steps):
            x, residual = (
                torch.cat(
                    (
                        self.rms(self.embedding[torch.tensor(following)], "layers.0.input_layernorm"),
                        self.rms(g, "layers.0.hidden_norm"),
                    ),
                    -1,
                ),
                g,
            )
            if self.config.get("norm_before_residual"):
                residual = self.rms(g, "layers.0.hidden_norm")
            for i in range(self.layer["num_hidden_layers"]):
                name = f"layers.{i}"
                if i > 0:
                    x = self.rms(residual, f"{name}.input_layernorm")
                residual = residual + self.attend(x, f"{name}.self_attn")
                x = self.rms(residual, f"{name}.post_attention_layernorm")
                gated = F.silu(F.linear(x, self.t[f"{name}.mlp.gate_proj.weight"])) * F.linear(
                    x, self.t[f"{name}.mlp.up_proj.weight"]
                )
                residual = residual + F.linear(gated, self.t[f"{name}.mlp.down_proj.weight"])
            last = self.rms(residual[-1], "norm")
            logits.append(F.linear(last, self.t["lm_head.weight"]))
            best = int(logits[-1].argmax())
            following = [*following, best + int(self.t["d2t"][best]) if "d2t" in self.t else best]
            g = torch.cat((g, (last if self.config.get("norm_output") else residual[-1])[None]))
        return logits


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("target"))


def write_head(folder: Path, layout: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LAYOUTS[layout]))
    save_file(head_tensors(layout), folder / "model.safetensors")
    return folder


@few(2)
@pytest.mark.parametrize("execution", ["eager", "compile"])
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_draft_logits_are_those_of_the_paper(
    layout: str, execution: str, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = write_head(tmp_path, layout)
    overrides = ["drafter=eagle3", f"drafter.path={head}", "drafter.adaptive=false", "drafter.max_width=3"]
    chunked = [
        "scheduler=chunked_prefill",
        "scheduler.token_budget=16",
        "model.dtype=float32",
        "overlap=false",  # no step beyond an end
        f"execution={execution}",
    ]
    plan = assemble([f"model.path={target}", "device=cpu", "exporter=[]", *overrides, *chunked])
    seen: list[tuple[int, list[Tensor]]] = []
    propose, build = Eagle3Drafter.propose, Eagle3Head.__init__

    def proposing(self: Eagle3Drafter, rows: DraftRows) -> DraftTokens:
        seen.append((int(rows.positions[0]), []))
        return propose(self, rows)

    def watched(self: Eagle3Head, *arguments: Any) -> None:
        build(self, *arguments)
        head = self.logits

        def logits(hidden: Tensor) -> Tensor:
            found: Tensor = head(hidden)
            seen[-1][1].append(found[0].clone())
            return found

        self.logits = logits

    # The copies are torch's work, so chains are no programs here: test_captured_drafts.py compares these with those.
    monkeypatch.setattr(Eagle3Drafter, "propose", proposing)
    monkeypatch.setattr(Eagle3Head, "__init__", watched)
    engine = build_engine(plan)
    seen.clear()
    prompt = [(7 * i + 3) % VOCAB for i in range(37)]
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    engine.core.submit(EngineRequest("r", tuple(prompt), sampling))
    tokens = list(prompt)
    while engine.core.has_work:
        tokens += [token for output in engine.core.step().outputs for token in output.tokens]
    engine.core.close()
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    paper = Paper(layout, head_tensors(layout), model)
    drafted = [(length, logits) for length, logits in seen if logits]
    assert len(drafted) >= 4 and max(len(logits) for _, logits in drafted) == 3
    for length, logits in drafted:
        for found, wanted in zip(logits, paper.chain(tokens[: length + 1], len(logits)), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def facts_of(target: Path) -> ModelFacts:
    return assemble([f"model.path={target}", "device=cpu"]).model


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hidden_size": 32}, "hidden_size=32, .* has 64"),
        ({"hidden_size": None}, "hidden_size is missing: expected a whole number"),
        ({"draft_vocab_size": 500}, "draft_vocab_size=500, .* has 120 tokens"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, r"layers \[1, 2\] .*expected 3 of them"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, r"layers \[1, 2, 4\] .* has 3 layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE 1 or 2"),
    ],
)
def test_a_head_for_another_model_is_refused_saying_why(
    change: dict[str, Any], expected: str, target: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | change))
    with pytest.raises(ValueError, match=expected):
        read_facts(str(tmp_path), facts_of(target))


@pytest.mark.parametrize("change", ["missing", "leftover", "shape", "tokens"])
def test_tensors_that_do_not_fit_stop_the_start(change: str, target: Path, tmp_path: Path) -> None:
    tensors = head_tensors("authors")
    if change == "missing":
        del tensors["midlayer.mlp.up_proj.weight"]
    elif change == "leftover":
        tensors["midlayer.surplus.weight"] = torch.ones(3)
    elif change == "tokens":
        tensors["d2t"] = tensors["d2t"] + VOCAB
    else:
        tensors["fc.weight"] = torch.ones(HIDDEN, HIDDEN)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    save_file(tensors, tmp_path / "model.safetensors")
    plan = assemble([f"model.path={target}", "device=cpu", "drafter=eagle3", f"drafter.path={tmp_path}"])
    with pytest.raises(DoesNotFit, match=r"drafter=eagle3: .*(up_proj|surplus|fc|d2t maps to tokens)"):
        build_engine(plan)


def test_auto_says_where_a_head_would_be_found(target: Path) -> None:
    with pytest.raises(ValueError, match=r"drafter.path=auto: .* comes without one .*set drafter.path"):
        Eagle3Drafter(Eagle3Config(), build_context())
