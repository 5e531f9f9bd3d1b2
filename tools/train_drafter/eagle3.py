"""An EAGLE3 head (arXiv:2503.01840) and its training-time test, in the checkpoint layout of SafeAILab and SpecForge.

The head reads three residual streams of the target, ``g = fc(taps)``, pairs ``g`` of position ``t`` with the embedding
of token ``t + 1``, and says what token ``t + 2`` is. Further ahead it reads its own output in place of ``g``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tools.train_drafter.features import Batch
from tools.train_drafter.parts import RMSNorm, SwiGLU, attend, rotate, rotations
from torch import Tensor, nn

STEP_WEIGHT = 0.8
"""Of a step of the training-time test, relative to the step before it."""


@dataclass(frozen=True, slots=True)
class Eagle3Sizes:
    """Names as in ``config.json``."""

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    taps: tuple[int, ...]
    """Residuals entering these layers of the target, ascending."""

    def config(self) -> dict[str, Any]:
        """``config.json``. A layer's id there means its output: the residual entering the layer after it."""
        sizes = {key: value for key, value in asdict(self).items() if key != "taps"}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **sizes,
            "num_hidden_layers": 1,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in self.taps],
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }


class _Attention(nn.Module):
    """The projections; they read token and hidden state side by side."""

    def __init__(self, sizes: Eagle3Sizes) -> None:
        super().__init__()
        read, dim = 2 * sizes.hidden_size, sizes.head_dim
        self.q_proj = nn.Linear(read, sizes.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(read, sizes.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(read, sizes.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(sizes.num_attention_heads * dim, sizes.hidden_size, bias=False)


class _MidLayer(nn.Module):
    def __init__(self, sizes: Eagle3Sizes) -> None:
        super().__init__()
        hidden, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = _Attention(sizes)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = SwiGLU(hidden, sizes.intermediate_size)


class Eagle3(nn.Module):
    """The names of parameters and buffers are those of the checkpoint."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, sizes: Eagle3Sizes, draft_vocab: Tensor, embedding: Tensor) -> None:
        """``draft_vocab``: int64, the target's ids that can be drafted, ascending. ``embedding``: the target's, float32
        ``[vocab_size, hidden_size]``; it stays as it is and is no part of the checkpoint."""
        super().__init__()
        self.sizes = sizes
        self.fc = nn.Linear(len(sizes.taps) * sizes.hidden_size, sizes.hidden_size, bias=False)
        self.midlayer = _MidLayer(sizes)
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.lm_head = nn.Linear(sizes.hidden_size, sizes.draft_vocab_size, bias=False)
        draftable = torch.zeros(sizes.vocab_size, dtype=torch.bool)
        draftable[draft_vocab] = True
        self.register_buffer("d2t", draft_vocab - torch.arange(len(draft_vocab)))
        self.register_buffer("t2d", draftable)
        self.register_buffer("_embedding", embedding, persistent=False)
        self.register_buffer("_to_draft", draftable.cumsum(0) - 1, persistent=False)

    @property
    def draft_vocab(self) -> Tensor:
        """The target's id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def start_from(self, head_weight: Tensor) -> None:
        """Say what the target says of the same hidden state: ``head_weight``, float32 ``[vocab_size, hidden_size]``, is
        its vocabulary projection; and take the last tap for the hidden state."""
        self.lm_head.weight.copy_(head_weight[self.draft_vocab])
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -self.sizes.hidden_size :] += torch.eye(self.sizes.hidden_size)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._buffers["_embedding"])  # type: ignore[arg-type]

    def to_draft(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Draft ids of the target's ids, and which of them there are; the others are 0."""
        known = self.t2d[ids]
        return torch.where(known, self._buffers["_to_draft"][ids], 0), known  # type: ignore[index]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))  # type: ignore[no-any-return]

    def keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[rows, n, kv_heads, head_dim]`` of ``x [rows, n, 2 * hidden]`` at positions."""
        attention, dim = self.midlayer.self_attn, self.sizes.head_dim
        k = attention.k_proj(x).unflatten(-1, (-1, dim))
        return rotate(k, self._rotations(positions)), attention.v_proj(x).unflatten(-1, (-1, dim))

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        q = self.midlayer.self_attn.q_proj(x).unflatten(-1, (-1, self.sizes.head_dim))
        return rotate(q, self._rotations(positions))

    def paired(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """What q, k and v read: ``[..., 2 * hidden]``."""
        layer = self.midlayer
        return torch.cat((layer.input_layernorm(self.embed(tokens)), layer.hidden_norm(hidden)), dim=-1)

    def output(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The layer's output from the hidden state that went in and what its heads found."""
        layer = self.midlayer
        hidden = hidden + layer.self_attn.o_proj(attended.flatten(-2))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))  # type: ignore[no-any-return]

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotations(positions, self.sizes.head_dim, self.sizes.rope_theta)


def unrolled(head: Eagle3, batch: Batch, steps: int) -> list[Tensor]:
    """Draft logits ``[rows, A, draft_vocab]`` of each step of the training-time test.

    Column ``a`` is a chain that begins at position ``s = starts[a]``: its step ``i`` reads token ``s + 1 + i`` and says
    what follows it. As in the server, the chain sees the keys of positions up to ``s``, made from the target's hidden
    states, and behind them its own ones, at ``s + 1 .. s + i``, made from the head's own output.
    """
    ids, starts = batch.ids, batch.starts
    rows, last = torch.arange(len(ids), device=ids.device)[:, None], ids.shape[1] - 1
    fused = head.fc(batch.taps.to(head.fc.weight.dtype))[:, :-1]
    pairs = head.paired(ids[:, 1:], fused)
    every = torch.arange(last, device=ids.device).expand(len(ids), -1)
    keys, values = head.keys(pairs, every)
    visible = every[:, None, :] <= starts[:, :, None]
    own: list[tuple[Tensor, Tensor]] = []
    hidden, x = fused[rows, starts.clamp(max=last - 1)], pairs[rows, starts.clamp(max=last - 1)]
    found = []
    for step in range(steps):
        if step:
            x = head.paired(ids[rows, (starts + 1 + step).clamp(max=last)], hidden)
            own.append(head.keys(x, starts + step))
        queries = head.queries(x, starts + step)
        hidden = head.output(hidden, attend(queries, keys, values, visible, own))
        found.append(head.logits(hidden))
    return found


def judged(batch: Batch, step: int) -> Tensor:
    """Chains whose step predicts a token that the target did answer: bool ``[rows, A]``."""
    return _shifted(batch.real, step + 1)


def chain_loss(head: Eagle3, batch: Batch, logits: Sequence[Tensor]) -> Tensor:
    """Cross entropy to the target's distribution over the draft vocabulary, where the target's first choice can be
    drafted: the sum over steps, weighted ``STEP_WEIGHT ** step``, of the mean over chains."""
    total = logits[0].new_zeros(())
    ids, known = head.to_draft(batch.choices)
    wanted = batch.probabilities * known
    wanted = wanted / wanted.sum(dim=-1, keepdim=True).clamp(min=1e-9)
    for step, found in enumerate(logits):
        where = judged(batch, step) & _shifted(known[..., 0], step + 1)
        if not bool(where.any()):
            continue
        target_ids, target = (_shifted(x, step + 1)[where] for x in (ids, wanted))
        likely = found[where].float().log_softmax(dim=-1).gather(-1, target_ids)
        total = total - STEP_WEIGHT**step * (target * likely).sum(dim=-1).mean()
    return total


def matches(head: Eagle3, batch: Batch, logits: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Whether the head's first choice is the target's, and where that is judged: bool ``[steps, rows, A]`` each."""
    right, where = [], []
    for step, found in enumerate(logits):
        drafted = head.draft_vocab[found.argmax(dim=-1)]
        right.append(drafted == _shifted(batch.choices[..., 0], step + 1))
        where.append(judged(batch, step))
    return torch.stack(right), torch.stack(where)


def checkpoint(head: Eagle3) -> dict[str, Tensor]:
    """The tensors to save: weights in bfloat16, the vocabulary's two maps as they are."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    return {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}


def _shifted(x: Tensor, by: int) -> Tensor:
    """Column ``a`` of the result is column ``a + by`` of ``x [rows, A, ...]``; zeros come in at the end."""
    gone = min(by, x.shape[1])
    return torch.cat((x[:, gone:], torch.zeros_like(x[:, :gone])), dim=1)
