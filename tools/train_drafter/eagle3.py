"""An EAGLE3 head (arXiv:2503.01840) and its training-time test, in the checkpoint layout of SafeAILab and SpecForge.

The head reads three residual streams of the target, ``g = fc(aux)``, pairs ``g`` of position ``t`` with the embedding
of token ``t + 1``, and says what token ``t + 2`` is. Further ahead it reads its own output in place of ``g``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tools.train_drafter.chains import DraftHead, HeadSizes
from tools.train_drafter.features import Batch
from tools.train_drafter.parts import Layer, RMSNorm, attend
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Sizes(HeadSizes):
    """Names as in ``config.json``."""

    fc_norm: bool = False
    """Each aux_layer passes a norm of its own first (EAGLE 3.1)."""
    norm_output: bool = False
    """What a position hands to the next is normed (EAGLE 3.1)."""

    def config(self) -> dict[str, Any]:
        """``config.json``."""
        return self.llama_config(
            "LlamaForCausalLMEagle3",
            "llama",
            draft_vocab_size=self.draft_vocab_size,
            num_hidden_layers=1,
            eagle_aux_hidden_state_layer_ids=self.tapped_outputs,
            fc_norm=self.fc_norm,
            norm_output=self.norm_output,
            tie_word_embeddings=False,
        )


class Eagle3(DraftHead):
    """See :class:`DraftHead`."""

    def __init__(self, sizes: Eagle3Sizes, draft_vocab: Tensor, embedding: Tensor) -> None:
        super().__init__(draft_vocab, embedding)
        self.sizes = sizes
        self.fc = nn.Linear(len(sizes.aux_layers) * sizes.hidden_size, sizes.hidden_size, bias=False)
        normed = sizes.aux_layers if sizes.fc_norm else ()
        self.fc_norm = nn.ModuleList(RMSNorm(sizes.hidden_size, sizes.rms_norm_eps) for _ in normed)
        self.midlayer = Layer(sizes, beside=True)
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.lm_head = nn.Linear(sizes.hidden_size, sizes.draft_vocab_size, bias=False)

    @torch.no_grad()
    def start_from(self, head_weight: Tensor) -> None:
        """Say what the target says of the same hidden state: ``head_weight``, float32 ``[vocab_size, hidden_size]``, is
        its vocabulary projection; and take the last aux_layer for the hidden state."""
        self.lm_head.weight.copy_(head_weight[self.draft_vocab])
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -self.sizes.hidden_size :] += torch.eye(self.sizes.hidden_size)

    def fuse(self, aux_layers: Tensor) -> Tensor:
        """``g [..., hidden]`` of aux_layers side by side, ``[..., len(aux_layers) * hidden]``."""
        aux_layers = aux_layers.to(self.fc.weight.dtype)
        if self.sizes.fc_norm:
            parts = aux_layers.chunk(len(self.sizes.aux_layers), dim=-1)
            aux_layers = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(aux_layers)  # type: ignore[no-any-return]

    def handed_on(self, hidden: Tensor) -> Tensor:
        """What stands for ``g`` one position further."""
        return self.norm(hidden) if self.sizes.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))  # type: ignore[no-any-return]

    def paired(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """What q, k and v read: ``[..., 2 * hidden]``."""
        layer = self.midlayer
        return torch.cat((layer.input_layernorm(self.embed(tokens)), layer.hidden_norm(hidden)), dim=-1)


def unrolled(head: Eagle3, batch: Batch, steps: int) -> list[Tensor]:
    """Draft logits ``[rows, A, draft_vocab]`` of each step of the training-time test.

    Column ``a`` is a chain that begins at position ``s = starts[a]``: its step ``i`` reads token ``s + 1 + i`` and says
    what follows it. As in the server, the chain sees the keys of positions up to ``s``, made from the target's hidden
    states, and after them its own ones, at ``s + 1 .. s + i``, made from the head's own output.
    """
    ids, starts = batch.ids, batch.starts
    rows, last = torch.arange(len(ids), device=ids.device)[:, None], ids.shape[1] - 1
    fused = head.fuse(batch.aux_layers)[:, :-1]
    pairs = head.paired(ids[:, 1:], fused)
    every = torch.arange(last, device=ids.device).expand(len(ids), -1)
    layer, attention = head.midlayer, head.midlayer.self_attn
    keys, values = attention.keys(pairs, every)
    visible = every[:, None, :] <= starts[:, :, None]
    own: list[tuple[Tensor, Tensor]] = []
    hidden, x = fused[rows, starts.clamp(max=last - 1)], pairs[rows, starts.clamp(max=last - 1)]
    found = []
    for step in range(steps):
        if step:
            hidden = head.handed_on(hidden)
            x = head.paired(ids[rows, (starts + 1 + step).clamp(max=last)], hidden)
            own.append(attention.keys(x, starts + step))
        queries = attention.queries(x, starts + step)
        hidden = layer.output(hidden, attend(queries, keys, values, visible, own))
        found.append(head.logits(hidden))
    return found
