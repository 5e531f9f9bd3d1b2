"""compressed-tensors ``pack-quantized``: integer codes in 32-bit words along the input, the first in the lowest bits,
stored as unsigned numbers. Zero points lie in words along the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from engine.checkpoint.tensors import CheckpointError
from engine.contracts.ops import LinearPart, LinearSpec, Range
from engine.contracts.quantizer import QuantizedWeight, StoredTensor
from engine_plugins.quantizer.checkpoint.layouts.rule import BOTH, TensorRule, bias_rule, scale_rules
from engine_plugins.quantizer.checkpoint.layouts.values import bias_of, fitted_scale, order_of, signed, unpacked
from engine_plugins.quantizer.checkpoint.scheme import Scheme

ORDER = "its input features are in activation order (weight_g_idx), so no cut holds whole groups"


def rules(scheme: Scheme, part: LinearPart, spec: LinearSpec) -> list[TensorRule]:
    """See :class:`~engine_plugins.quantizer.checkpoint.layouts.Layout`."""
    out, inputs, per_word = part.out_features, spec.in_features, scheme.codes_per_word
    axes = {"out": 0} if scheme.ordered else {"out": 0, "in": 1}
    words = StoredTensor("weight_packed", axes, {"in": per_word}, uncuttable=ORDER if scheme.ordered else "")
    found = [
        TensorRule(words, ("int32",), ((out, -(-inputs // per_word)),)),
        *scale_rules(scheme, part, inputs),
        TensorRule(StoredTensor("weight_shape", optional=True, replicated=BOTH), ("int64", "int32"), ((2,),)),
        bias_rule(part),
    ]
    scale = found[1].stored
    if not scheme.symmetric:
        zeros = StoredTensor(
            "weight_zero_point", scale.shard_axes, {**scale.per_entry, "out": per_word}, replicated=scale.replicated
        )
        found.append(TensorRule(zeros, ("int32",), ((-(-out // per_word), scheme.groups(inputs)),)))
    if scheme.ordered:
        index = StoredTensor("weight_g_idx", replicated=("out",), uncuttable=ORDER)
        found.append(TensorRule(index, ("int32", "int64"), ((inputs,),)))
    return found


def read(
    scheme: Scheme, name: str, tensors: Mapping[str, Tensor], in_features: int, rows: Sequence[Range] | None = None
) -> QuantizedWeight:
    """See :class:`~engine_plugins.quantizer.checkpoint.layouts.Layout`."""
    words = tensors["weight_packed"]
    out, inputs = words.shape[0], min(words.shape[1] * scheme.codes_per_word, in_features)
    _check_shape(name, tensors.get("weight_shape"), rows or ((0, out),), in_features, rows is None)
    codes = signed(unpacked(words, scheme.bits), scheme.bits)[:, :inputs]
    group_size = min(scheme.group_size(in_features), inputs)
    scale = fitted_scale(f"{name}.weight_scale", tensors["weight_scale"])
    scale = scale.reshape(1, 1).expand(out, 1) if scheme.granularity == "tensor" else scale.reshape(out, -1)
    order = _order(name, tensors.get("weight_g_idx"), group_size)
    if order is not None:
        codes = codes[:, order]
    return QuantizedWeight(
        codes.contiguous(),
        scale.contiguous(),
        group_size,
        scheme.bits,
        zero=_zeros(scheme, tensors.get("weight_zero_point"), out),
        order=order,
        bias=bias_of(tensors),
    )


def _check_shape(name: str, stated: Tensor | None, rows: Sequence[Range], in_features: int, all_rows: bool) -> None:
    """``rows``: those that are here."""
    if stated is None:
        return
    out, inputs = stated.tolist()
    last = rows[-1][1]
    if inputs != in_features or out < last or (all_rows and out != last):
        raise CheckpointError(
            f"{name}.weight_shape is [{out}, {inputs}], the layer has {in_features} input features and "
            f"{last if all_rows else f'at least {last}'} outputs"
        )


def _zeros(scheme: Scheme, words: Tensor | None, out: int) -> Tensor | None:
    """int8 ``[out, groups]`` from words ``[out / codes_per_word, groups]``."""
    if words is None:
        return None
    return signed(unpacked(words.T, scheme.bits), scheme.bits).T[:out].contiguous()


def _order(name: str, index: Tensor | None, group_size: int) -> Tensor | None:
    # Writers fill the tensor with -1 where a layer was left in its own order.
    if index is None or bool((index == -1).all()):
        return None
    return order_of(f"{name}.weight_g_idx", index, group_size, may_start_anywhere=False)
