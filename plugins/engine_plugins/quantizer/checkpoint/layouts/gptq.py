"""GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel store it: ``qweight`` int32 ``[in * bits / 32, out]``, words along
the input, the first feature in the lowest bits; ``qzeros`` ``[groups, out * bits / 32]``, words along the output;
``scales`` ``[groups, out]``; ``g_idx`` ``[in]``, the group of each input feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from engine.checkpoint.tensors import CheckpointError
from engine.contracts.ops import LinearPart, LinearSpec, Range
from engine.contracts.quantizer import QuantizedWeight, StoredTensor
from engine_plugins.quantizer.checkpoint.layouts.rule import FLOATS, TensorRule, bias_rule
from engine_plugins.quantizer.checkpoint.layouts.values import fitted_scale, order_of, signed, unpacked
from engine_plugins.quantizer.checkpoint.scheme import Scheme

ORDER = "its input features are in activation order (desc_act), so no cut holds whole groups"
ONES = {4: 0x11111111, 8: 0x01010101}
"""A one for every code of a word, by bits."""


def rules(scheme: Scheme, part: LinearPart, spec: LinearSpec) -> list[TensorRule]:
    """See :class:`~engine_plugins.quantizer.checkpoint.layouts.Layout`."""
    out, inputs, per_word = part.out_features, spec.in_features, scheme.codes_per_word
    groups = scheme.groups(inputs)
    why = ORDER if scheme.ordered else ""
    axes = {"out": 1} if scheme.ordered else {"in": 0, "out": 1}
    grouped, kept = (axes, ()) if groups > 1 else ({"out": 1}, ("in",))
    group = {"in": scheme.group_size(inputs)}
    words = StoredTensor("qweight", axes, {"in": per_word}, uncuttable=why)
    zeros = StoredTensor("qzeros", grouped, {**group, "out": per_word}, replicated=kept)
    index = StoredTensor(
        "g_idx", {} if scheme.ordered else {"in": 0}, optional=not scheme.ordered, replicated=("out",), uncuttable=why
    )
    return [
        TensorRule(words, ("int32",), ((-(-inputs // per_word), out),)),
        TensorRule(zeros, ("int32",), ((groups, -(-out // per_word)),)),
        TensorRule(StoredTensor("scales", grouped, group, replicated=kept), FLOATS, ((groups, out),)),
        TensorRule(index, ("int32", "int64"), ((inputs,),)),
        # AutoGPTQ wrote a bias of zeros for layers that have none.
        bias_rule(part, may_be_extra=True),
    ]


def read(
    scheme: Scheme, name: str, tensors: Mapping[str, Tensor], in_features: int, rows: Sequence[Range] | None = None
) -> QuantizedWeight:
    """See :class:`~engine_plugins.quantizer.checkpoint.layouts.Layout`."""
    words = tensors["qweight"]
    out, inputs = words.shape[1], min(words.shape[0] * scheme.codes_per_word, in_features)
    codes = signed(unpacked(words.T, scheme.bits), scheme.bits)[:, :inputs]
    group_size = min(scheme.group_size(in_features), inputs)
    order = None
    if "g_idx" in tensors:
        order = order_of(f"{name}.g_idx", tensors["g_idx"], group_size, may_start_anywhere=inputs < in_features)
    if order is not None:
        codes = codes[:, order]
    return QuantizedWeight(
        codes.contiguous(),
        fitted_scale(f"{name}.scales", tensors["scales"]).T.contiguous(),
        group_size,
        scheme.bits,
        zero=_zeros(scheme, f"{name}.qzeros", tensors["qzeros"], out),
        order=order,
        bias=None if "bias" not in tensors else tensors["bias"].float(),
    )


def _zeros(scheme: Scheme, name: str, words: Tensor, out: int) -> Tensor | None:
    """int8 ``[out, groups]``; ``None`` for the middle everywhere."""
    if scheme.stored_zeros_less_one:
        # One was taken from each code within its word, with borrows between codes: given back in the same way.
        words = words + ONES[scheme.bits]
    zeros = signed(unpacked(words, scheme.bits), scheme.bits).T[:out].contiguous()
    if not scheme.symmetric:
        return zeros
    if bool(zeros.any()):
        raise CheckpointError(
            f"{name} has zero points that are not the middle, but sym=true: is checkpoint_format "
            f"{'gptq_v2' if scheme.stored_zeros_less_one else 'gptq'}, or sym false?"
        )
    return None
