import pytest
import torch

from engine.contracts.config import ParallelismConfig
from engine.contracts.ops import LinearPart, LinearSpec
from engine.contracts.parallelism import Parallelism
from engine.testing.context import build_context
from engine_plugins.parallelism.single import GROUPS, SingleDevice


@pytest.fixture
def single():
    return SingleDevice(ParallelismConfig(), build_context())


def test_it_fulfils_the_contract_on_one_healthy_rank(single):
    assert isinstance(single, Parallelism)
    assert (single.rank, single.world_size, single.healthy()) == (0, 1, ())
    single.launch("{}")
    single.close()


def test_every_layer_is_whole(single):
    for shard in ("out", "in", "none"):
        assert single.shard(LinearSpec((LinearPart("q", 4),), 4, shard)) == (0, 1)


@pytest.mark.parametrize("group", GROUPS)
def test_a_collective_over_one_rank_gives_back_what_went_in(group, single):
    x = torch.arange(6.0).reshape(2, 3)
    for result in (
        single.all_reduce(x, group),
        single.all_gather(x, group, 0),
        single.reduce_scatter(x, group, 1),
        single.all_to_all(x, group),
    ):
        assert torch.equal(result, x)
    assert single.broadcast(b"plan", group) == b"plan"


def test_an_unknown_group_is_an_error_even_here(single):
    for call in (
        lambda: single.all_reduce(torch.ones(1), "world"),
        lambda: single.broadcast(b"", "world"),
    ):
        with pytest.raises(ValueError, match="'world'"):
            call()
