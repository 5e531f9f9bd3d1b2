import pytest
import torch

from engine.cli.plugins.templates.parallelism.plugin import GROUPS, MineParallelism, MineParallelismConfig
from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.parallelism import Parallelism
from engine.testing.context import build_context


def make() -> MineParallelism:
    return MineParallelism(MineParallelismConfig(), build_context())


def test_it_fulfils_the_contract() -> None:
    plugin = make()
    assert isinstance(plugin, Parallelism) and 0 <= plugin.rank < plugin.world_size
    assert plugin.healthy() == ()
    plugin.close()


def test_every_rank_holds_one_of_equal_cuts() -> None:
    plugin = make()
    index, count = plugin.shard(LinearSpec((LinearPart("q", 8),), 8, shard="out"))
    assert 0 <= index < count <= plugin.world_size


@pytest.mark.parametrize("group", GROUPS)
def test_collectives_over_one_rank_give_back_what_went_in(group: str) -> None:
    plugin, x = make(), torch.arange(6.0).reshape(2, 3)
    results = (plugin.all_reduce(x, group), plugin.all_gather(x, group, 0), plugin.reduce_scatter(x, group, 1))
    assert all(torch.equal(result, x) for result in (*results, plugin.all_to_all(x, group)))
    assert plugin.broadcast(b"plan", group) == b"plan"


def test_an_unknown_group_is_an_error() -> None:
    with pytest.raises(ValueError, match="'world'"):
        make().broadcast(b"", "world")
