"""Ways to split work over devices."""

from __future__ import annotations

from typing import Any

from engine_plugins.parallelism.single import SingleDevice


class ShardText(SingleDevice):
    """Says in words what it holds."""

    says = r"shard\(\) returned 'all', expected \(index, count\)"

    def shard(self, spec: Any) -> Any:
        return "all"


class ThirdOfTwo(SingleDevice):
    """Holds a cut that there is not."""

    says = r"shard\(\) returned \(2, 2\), expected \(index, count\) of 1 ranks"

    def shard(self, spec: Any) -> Any:
        return 2, 2


class HalfOfOne(SingleDevice):
    """Holds half of what it has to hold alone."""

    says = r"shard\(\) returned \(0, 2\), expected \(index, count\) of 1 ranks"

    def shard(self, spec: Any) -> Any:
        return 0, 2


class TwoRanks(SingleDevice):
    """Says that there are two ranks where one was asked for."""

    says = r"world_size is 2, expected 1"
    world_size = 2


class RankText(SingleDevice):
    """``rank`` is a text."""

    says = r"rank is '0', expected int"
    rank: Any = "0"


class ShardRaises(SingleDevice):
    """Raises at every call."""

    says = r"shard\(\) raised OSError: no peers \(parallelisms\.py:\d+\)"

    def shard(self, spec: Any) -> Any:
        raise OSError("no peers")
