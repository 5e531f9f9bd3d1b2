"""A torch function of an architecture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from torch import Tensor

from engine.contracts.ops import TorchFunction
from engine.kernels.checks.linear import TOLERANCE
from engine.kernels.checks.tensors import random, tensor_problem, value_problem
from engine.plugin_guard.calls import PluginError, noting, quote

ROWS = 3


def tried(op: TorchFunction, tensors: Sequence[Tensor], dtype: torch.dtype, device: str) -> Callable[..., Tensor]:
    """The function of ``op`` in the compute dtype, after a trial on a few random rows. Raises
    :class:`~engine.plugin_guard.calls.PluginError`, and what the function raises."""
    whose = f"torch function {op.function}"
    function = noting(_found(op.function, whose), whose)
    inputs = [random((ROWS, size), dtype, torch.device(device), seed) for seed, size in enumerate(op.in_features)]
    if problem := _problem(op, lambda *inputs: function(*inputs, *tensors), inputs):
        raise PluginError(f"{whose} {problem}")

    def computed(*inputs: Tensor) -> Tensor:
        made: Tensor = function(*inputs, *tensors).to(dtype)
        return made

    return computed


def _problem(op: TorchFunction, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> str:
    """What it does that it may not; empty if nothing."""
    kept = [x.clone() for x in inputs]
    made = function(*inputs)
    dtype = inputs[0].dtype
    if isinstance(made, Tensor) and made.is_floating_point():
        dtype = made.dtype
    if problem := tensor_problem(made, (ROWS, op.out_features), dtype, inputs[0].device):
        return problem
    if not all(map(torch.equal, inputs, kept)):
        return "changed its input"
    if made.data_ptr() in [x.data_ptr() for x in inputs]:
        return "returned memory that is in use, expected new memory"
    tolerance = TOLERANCE[inputs[0].dtype]
    for row in range(ROWS):
        one = slice(row, row + 1)
        if problem := value_problem(function(*[x[one] for x in inputs]), made[one], tolerance):
            return f"does not compute each token by itself: one alone {problem}"
    if op.by_feature:
        some = max(1, op.out_features // 2)
        found = function(*[x[:, :some].contiguous() for x in inputs])
        if found.shape != (ROWS, some):
            return f"returned {list(found.shape)} of {some} features, expected as many: it is said to be by_feature"
        if problem := value_problem(found, made[:, :some], tolerance):
            return f"does not compute each feature by itself (by_feature): some of them alone, it {problem}"
    return ""


def _found(path: str, whose: str) -> Callable[..., Tensor]:
    module, _, name = path.partition(":")
    try:
        found: object = getattr(import_module(module), name)
    except Exception as error:  # whatever a third party's module raises
        raise PluginError(f"{whose} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise PluginError(f"{whose} is {quote(found)}, expected a function")
    return found
