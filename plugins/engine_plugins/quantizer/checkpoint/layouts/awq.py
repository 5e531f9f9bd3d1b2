"""AutoAWQ's ``gemm`` layout: ``qweight`` int32 ``[in, out / 8]``, eight output features in a word in the order 0, 2, 4,
6, 1, 3, 5, 7 from the lowest bits; ``qzeros`` ``[groups, out / 8]`` likewise; ``scales`` ``[groups, out]``.
``weight = (q - zero) * scale`` (arXiv 2306.00978)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.contracts.ops import LinearPart, LinearSpec, Range
from engine.contracts.quantizer import QuantizedWeight, StoredTensor
from engine_plugins.quantizer.checkpoint.layouts.rule import FLOATS, TensorRule, bias_rule
from engine_plugins.quantizer.checkpoint.layouts.values import bias_of, fitted_scale, signed, unpacked
from engine_plugins.quantizer.checkpoint.scheme import Scheme

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in its word of each of eight output features."""


def rules(scheme: Scheme, part: LinearPart, spec: LinearSpec) -> list[TensorRule]:
    """See :class:`~engine_plugins.quantizer.checkpoint.layouts.Layout`."""
    out, inputs, groups = part.out_features, spec.in_features, scheme.groups(spec.in_features)
    # An output size that eight does not divide fits no shape here, and is refused for it.
    words = out // scheme.codes_per_word
    axes, kept = ({"in": 0, "out": 1}, ()) if groups > 1 else ({"out": 1}, ("in",))
    group, word = {"in": scheme.group_size(inputs)}, {"out": scheme.codes_per_word}
    return [
        TensorRule(StoredTensor("qweight", {"in": 0, "out": 1}, word), ("int32",), ((inputs, words),)),
        TensorRule(StoredTensor("qzeros", axes, group | word, replicated=kept), ("int32",), ((groups, words),)),
        TensorRule(StoredTensor("scales", axes, group, replicated=kept), FLOATS, ((groups, out),)),
        bias_rule(part),
    ]


def read(
    scheme: Scheme, name: str, tensors: Mapping[str, Tensor], in_features: int, rows: Sequence[Range] | None = None
) -> QuantizedWeight:
    """See :class:`~engine_plugins.quantizer.checkpoint.layouts.Layout`."""
    codes = _in_order(tensors["qweight"], scheme.bits)
    return QuantizedWeight(
        codes,
        fitted_scale(f"{name}.scales", tensors["scales"]).T.contiguous(),
        min(scheme.group_size(in_features), codes.shape[1]),
        scheme.bits,
        zero=_in_order(tensors["qzeros"], scheme.bits),
        bias=bias_of(tensors),
    )


def _in_order(words: Tensor, bits: int) -> Tensor:
    """int32 ``[rows, out / 8]`` -> int8 ``[out, rows]``. Words are turned before codes: there are fewer of them."""
    turned = words.T.contiguous()
    codes = unpacked(turned, bits).reshape(*turned.shape, len(PLACES)).transpose(1, 2)
    return signed(codes[:, torch.tensor(PLACES)].reshape(-1, words.shape[0]), bits).contiguous()
