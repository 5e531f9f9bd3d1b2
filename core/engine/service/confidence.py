"""How sure a model is of the beginning of its answer, and from where on that is enough: a table that was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.assembly.errors import AssemblyError


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often a model's answers agree with those of a larger one, by its confidence: a file of JSON that ``engine
    calibrate`` writes."""

    model: str
    """The smaller one, by its name at the gateway."""
    reference: str
    """The larger one."""
    prompts: int
    """How many were asked."""
    tokens: int
    """Of the beginning of an answer."""
    quantile: float
    """Of their log probabilities: :func:`confidence` is this one."""
    agreement: tuple[tuple[float, float], ...]
    """From which confidence on which share agrees, both ascending."""

    def threshold(self, least: float) -> float | None:
        """The lowest confidence from which on a share of at least ``least`` agrees; ``None``: there is none."""
        return next((low for low, share in self.agreement if share >= least), None)


def confidence(logprobs: Sequence[float], quantile: float) -> float:
    """A low quantile of the tokens' log probabilities: their mean or sum would depend on how many there are (Gupta et
    al., arXiv:2404.10136). ``logprobs``: at least one."""
    return sorted(logprobs)[math.floor(quantile * len(logprobs))]


def read_calibration(key: str, path: str) -> Calibration:
    """``key``: of the setting, for messages. Raises :class:`AssemblyError`."""
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=Calibration)
    except OSError as error:
        raise AssemblyError([f"{key}={path}: {error.strerror or 'cannot be read'}"]) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise AssemblyError([f"{key}={path}: is no table of engine calibrate: {error}"]) from None
    ascends = all(
        low <= high
        for a, b in zip(found.agreement, found.agreement[1:], strict=False)
        for low, high in zip(a, b, strict=True)
    )
    if not found.agreement or not ascends or not 0.0 <= found.quantile < 1.0 or found.tokens < 1:
        raise AssemblyError([f"{key}={path}: expected tokens from 1, a quantile from 0 to 1, and shares that ascend"])
    return found
