"""Drafters, on the host and on the device."""

from __future__ import annotations

from typing import Any

import torch

from engine.contracts.drafter import Draft, DraftTokens
from engine_plugins.drafter.early_exit import EarlyExitDrafter


class Host:
    """Correct: proposes the last token again."""

    placement: Any = "host"
    max_width: Any = 4

    def __init__(self, config: Any, context: Any) -> None:
        self.vocab_size = context.model.vocab_size

    def propose(self, rows: Any) -> Any:
        return Draft(tuple((row.tokens[-1],) * row.num_draft_tokens for row in rows))

    def release(self, row_id: int) -> None:
        pass


class Device(EarlyExitDrafter):
    """Correct: drafts with the target's first layer."""

    def __init__(self, config: Any, context: Any) -> None:
        self.max_width = config.max_width
        self._num_layers = 1
        self.kv = None


class ProposesList(Host):
    """Returns a list of lists, not a Draft."""

    says = r"propose\(\) returned \[\[.*expected a Draft"

    def propose(self, rows: Any) -> Any:
        return [[1] for _ in rows]


class TooMany(Host):
    """Proposes a token more than was wanted."""

    says = r"propose\(\) proposed \d+ tokens, at most \d+ were wanted"

    def propose(self, rows: Any) -> Any:
        return Draft(tuple((1,) * (row.num_draft_tokens + 1) for row in rows))


class OutsideTheVocabulary(Host):
    """Proposes a token that the model does not have."""

    says = r"propose\(\) proposed token 120, expected an int from 0 to 119"

    def propose(self, rows: Any) -> Any:
        return Draft(tuple((self.vocab_size,) for _ in rows))


class Halves(Host):
    """Proposes numbers that are no integers."""

    says = r"propose\(\) proposed token 1\.0, expected an int"

    def propose(self, rows: Any) -> Any:
        return Draft(tuple((1.0,) for _ in rows))  # type: ignore[misc]


class Appends(Host):
    """Appends its drafts to the request's own tokens."""

    says = r"propose\(\) changed the tokens of a request"

    def propose(self, rows: Any) -> Any:
        for row in rows:
            row.tokens.append(1)
        return super().propose(rows)


class Promised(Host):
    """Proposes in a coroutine."""

    says = r"propose\(\) is a coroutine, expected a plain method"

    async def propose(self, rows: Any) -> Any:
        return Draft(())


class ForgetsRows(Host):
    """Answers no row."""

    says = r"propose\(\) answered 0 rows, expected 1"

    def propose(self, rows: Any) -> Any:
        return Draft(())


class Raises(Host):
    """Raises at every call."""

    says = r"propose\(\) raised ValueError: boom \(drafters\.py:\d+\)"

    def propose(self, rows: Any) -> Any:
        raise ValueError("boom")


class Exits(Host):
    """Ends the process."""

    says = r"propose\(\) raised SystemExit: 1"

    def propose(self, rows: Any) -> Any:
        raise SystemExit(1)


class ReleaseRaises(Host):
    """Fails when a request ends."""

    says = r"release\(\) raised KeyError: 0"

    def release(self, row_id: int) -> None:
        raise KeyError(row_id)


class Elsewhere(Host):
    """Runs on a device that there is not."""

    says = r"placement is 'gpu', expected 'host' or 'device'"
    placement = "gpu"


class SaysDevice(Host):
    """Says that it runs on the device, and has no method for it."""

    says = r"placement is 'device', and it lacks .*extend.*start"
    placement = "device"


class NoPropose:
    """Says that it runs on the host, and proposes nothing."""

    says = r"placement is 'host', and it lacks propose"
    placement = "host"
    max_width = 4

    def __init__(self, config: Any, context: Any) -> None:
        pass

    def release(self, row_id: int) -> None:
        pass


class Width(Host):
    """``max_width`` is a fraction."""

    says = r"max_width is 3\.5, expected int"
    max_width = 3.5


class StartRaises(Device):
    """Fails when it is started."""

    says = r"start\(\) raised RuntimeError: no weights \(drafters\.py:\d+\)"

    def start(self, engine: Any) -> None:
        raise RuntimeError("no weights")


class ExtendRaises(Device):
    """Fails after every step."""

    says = r"extend\(\) raised RuntimeError: lost \(drafters\.py:\d+\)"

    def extend(self, step: Any) -> None:
        raise RuntimeError("lost")


class OtherShape(Device):
    """Proposes one token a row whatever is wanted."""

    says = r"propose\(\) proposed tokens \[1, 1\], expected 1 rows of at least \d+"

    def propose(self, rows: Any) -> Any:
        return DraftTokens(super().propose(rows).tokens[:, :1])


class OtherDtype(Device):
    """Proposes tokens in int32."""

    says = r"propose\(\) proposed torch\.int32 on cpu, expected torch\.int64 on cpu"

    def propose(self, rows: Any) -> Any:
        return DraftTokens(super().propose(rows).tokens.int())


class NegativeTokens(Device):
    """Proposes tokens that there are not."""

    says = r"propose\(\) proposed token ids outside of the vocabulary"

    def propose(self, rows: Any) -> Any:
        return DraftTokens(torch.full_like(super().propose(rows).tokens, -5))


class Tensors(Device):
    """Proposes a tensor without its record."""

    says = r"propose\(\) returned tensor\(.*expected DraftTokens of a tensor"

    def propose(self, rows: Any) -> Any:
        return super().propose(rows).tokens


class AuxNames(Device):
    """``aux_layers`` are names."""

    says = r"aux_layers\[0\] is 'last', expected int"
    aux_layers: Any = ("last",)
