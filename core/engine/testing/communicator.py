"""Conformance suite for communicators: derive a test class, say how to make yours, and run pytest.

.. code-block:: python

    class TestMine(CommunicatorConformance):
        def make(self):
            return Mine(MineConfig(), build_context())

Every rank is a thread of the process that runs the tests, unless :meth:`CommunicatorConformance.run` is overridden:
what ranks do are functions of modules, which other processes find by name. ``sizes``: how many ranks there are, one
run of every test for each. A communicator with native functions inherits :class:`NativeConformance` instead.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.contracts.communicator import Communicator, CommunicatorError, NativeCommunicator, World
from engine.native import in_one
from engine.plugin_guard.calls import lacking
from engine.testing.subject import Subject, Suite, filled

Job = Callable[[Communicator, World], Any]
Groups = Mapping[str, tuple[int, ...]]
"""All groups of a run; a rank is told of those that it is in."""

SUMMED = ("float32", "bfloat16", "float16")
MOVED = (*SUMMED, "int64", "int32", "uint8", "bool", "float64")
COUNTS = (1, 2, 3, 15, 17, 64, 1000, 4099, 70_001, 1_050_003)
"""Elements of a sum: odd ones, and some beyond the size of any buffer."""
NEVER_S = 120.0
"""No call takes so long: a rank that is still at work then hangs."""


def sample(seed: int, shape: Sequence[int], dtype: str, device: str = "cpu") -> Tensor:
    """Numbers of very different sizes, whose sum depends on the order."""
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        x = torch.randn(*shape, generator=generator)
        return (x * 10.0 ** torch.randint(-3, 3, shape, generator=generator)).to(kind).to(device)
    return torch.randint(0, 2 if kind == torch.bool else 200, shape, generator=generator).to(kind).to(device)


def in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """What a sum over ranks must be."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.numel() else True


# What ranks do. Each returns what is wrong, a line each.


def sum_all(communicator: Communicator, world: World, *, counts: Sequence[int], exact: bool) -> list[str]:
    """all_reduce on ``world``."""
    wrong = []
    for dtype in SUMMED:
        for count in counts:
            parts = [sample(100 * rank + count, (count,), dtype, world.device) for rank in range(world.size)]
            x, expected = parts[world.rank].clone(), in_rank_order(parts)
            result = communicator.all_reduce(x, "world")
            if result.data_ptr() != x.data_ptr():
                wrong.append(f"all_reduce of {count} {dtype} returned another tensor")
            alike = same_bits(x, expected) if exact else torch.allclose(x.float(), expected.float(), rtol=0.02)
            if not alike:
                wrong.append(f"all_reduce of {count} {dtype} on rank {world.rank} is not the sum in rank order")
    return wrong


def sum_of_shape(communicator: Communicator, world: World) -> list[str]:
    """all_reduce leaves shapes alone."""
    x = torch.full((3, 1, 5), float(world.rank + 1), device=world.device)
    communicator.all_reduce(x, "world")
    expected = sum(range(1, world.size + 1))
    return [] if x.shape == (3, 1, 5) and bool((x == expected).all()) else [f"all_reduce of [3, 1, 5] became {x}"]


def gather_all(communicator: Communicator, world: World) -> list[str]:
    """all_gather of every dtype, with shapes that differ, some of them empty."""
    wrong = []
    for dtype in MOVED:
        for base in (0, 1, 7, 3000):
            shapes = [(base * (rank % 3), 3) for rank in range(world.size)]
            given = [sample(rank + base, shape, dtype, world.device) for rank, shape in enumerate(shapes)]
            parts = [torch.empty_like(x) for x in given]
            communicator.all_gather(given[world.rank], "world", parts)
            if not all(map(same_bits, parts, given)):
                wrong.append(f"all_gather of {shapes} {dtype} on rank {world.rank} is not what was given")
    return wrong


def scatter_sums(communicator: Communicator, world: World, *, exact: bool) -> list[str]:
    """reduce_scatter with counts that differ, some of them 0."""
    wrong = []
    for dtype in SUMMED:
        for columns in (1, 5, 2500):
            counts = [(rank * 7 + 3) % 5 for rank in range(world.size)]
            shape = (sum(counts), columns)
            parts = [sample(10 * rank + columns, shape, dtype, world.device) for rank in range(world.size)]
            first = sum(counts[: world.rank])
            expected = in_rank_order(parts)[first : first + counts[world.rank]]
            before = parts[world.rank].clone()
            got = communicator.reduce_scatter(parts[world.rank], "world", counts)
            alike = same_bits(got, expected) if exact else torch.allclose(got.float(), expected.float(), rtol=0.02)
            if got.shape != expected.shape or not alike:
                wrong.append(f"reduce_scatter of {counts} rows of {columns} {dtype} on rank {world.rank} is wrong")
            if not same_bits(parts[world.rank], before):
                wrong.append("reduce_scatter changed its input")
    return wrong


def exchange_all(communicator: Communicator, world: World) -> list[str]:
    """all_to_all of every dtype, with shapes that differ, some of them empty."""
    wrong = []
    for dtype in MOVED:
        for base in (0, 1, 1000, 40_000):

            def part(source: int, to: int, base: int = base, dtype: str = dtype) -> Tensor:
                return sample(source * 10 + to, (base * ((source + 2 * to) % 3),), dtype, world.device)

            parts = [part(world.rank, to) for to in range(world.size)]
            expected = [part(source, world.rank) for source in range(world.size)]
            received = [torch.empty_like(x) for x in expected]
            communicator.all_to_all(parts, "world", received)
            if not all(map(same_bits, received, expected)):
                wrong.append(f"all_to_all of {base} {dtype} on rank {world.rank} is not what was sent to it")
    return wrong


def broadcast_all(communicator: Communicator, world: World) -> list[str]:
    """broadcast of every dtype from every rank."""
    wrong = []
    for dtype in MOVED:
        for source in range(world.size):
            for count in (0, 1, 33, 300_000):
                expected = sample(source + count, (count,), dtype, world.device)
                x = expected.clone() if world.rank == source else torch.zeros_like(expected)
                result = communicator.broadcast(x, "world", source)
                if result.data_ptr() != x.data_ptr() or not same_bits(x, expected):
                    wrong.append(f"broadcast of {count} {dtype} from {source} to {world.rank} is not what was sent")
    return wrong


def pass_on(communicator: Communicator, world: World) -> list[str]:
    """send and recv down a chain of ranks, large and small ones, in order; what was sent is overwritten at once."""
    wrong = []
    for step, count in enumerate((1, 0, 1000, 3_000_001, 7)):
        expected = sample(step, (count,), "float32", world.device)
        x = expected.clone() if world.rank == 0 else torch.zeros_like(expected)
        if world.rank > 0:
            result = communicator.recv(x, world.rank - 1)
            if result.data_ptr() != x.data_ptr() or not same_bits(x, expected):
                wrong.append(f"message {step} of {count} elements that rank {world.rank} received is not what was sent")
        if world.rank + 1 < world.size:
            communicator.send(x, world.rank + 1)
            x.zero_()
    return wrong


def send_all_then_receive(communicator: Communicator, world: World) -> list[str]:
    """Several messages on their way between the same ranks keep their order."""
    wrong = []
    for source in range(world.size):
        to = (source + 1) % world.size
        for number in range(20):
            x = torch.full((number,), number, dtype=torch.int64, device=world.device)
            if world.rank == source:
                communicator.send(x, to)
            if world.rank == to:
                got = communicator.recv(torch.zeros_like(x), source)
                if not same_bits(got, x):
                    wrong.append(f"message {number} from {source} to {to} is another one")
    return wrong


def any_sequence(communicator: Communicator, world: World, *, seed: int, length: int, groups: Groups) -> list[str]:
    """Calls of all kinds, drawn alike on all ranks, on groups that overlap."""
    draw, wrong = random.Random(seed), []
    for number in range(length):
        name = draw.choice(sorted(groups))
        kind = draw.choice(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"))
        dtype, count = draw.choice(SUMMED), draw.choice((1, 2, 31, 512, 5000, 100_003))
        ranks = groups[name]
        source, to = draw.sample(ranks, 2)
        if world.rank not in ranks:
            continue
        index = ranks.index(world.rank)
        given = [sample(1000 * number + rank, (count,), dtype, world.device) for rank in ranks]
        mine, got, expected = given[index].clone(), [], given
        if kind == "all_reduce":
            got, expected = [communicator.all_reduce(mine, name)], [in_rank_order(given)]
        elif kind == "all_gather":
            got = [torch.empty_like(mine) for _ in ranks]
            communicator.all_gather(mine, name, got)
        elif kind == "reduce_scatter":
            counts = [count // len(ranks)] * len(ranks)
            counts[0] += count - sum(counts)
            first = sum(counts[:index])
            got = [communicator.reduce_scatter(mine, name, counts)]
            expected = [in_rank_order(given)[first : first + counts[index]]]
        elif kind == "all_to_all":
            got = [torch.empty_like(mine) for _ in ranks]
            communicator.all_to_all([mine + i for i in range(len(ranks))], name, got)
            expected = [x + index for x in given]
        elif kind == "broadcast":
            got, expected = [communicator.broadcast(mine, name, source)], [given[ranks.index(source)]]
        elif world.rank == source:
            communicator.send(mine, to)
            expected = []
        elif world.rank == to:
            got, expected = [communicator.recv(mine, source)], [given[ranks.index(source)]]
        else:
            expected = []
        if len(got) != len(expected) or not all(map(same_bits, got, expected)):
            wrong.append(f"seed {seed}, call {number}, {kind} of {count} {dtype} on {name}: rank {world.rank} differs")
    return wrong


def count_calls(communicator: Communicator, world: World) -> list[int]:
    """``begun`` before and after some calls."""
    seen = [communicator.begun]
    x = torch.ones(4, device=world.device)
    communicator.all_reduce(x, "world")
    seen.append(communicator.begun)
    communicator.broadcast(x, "world", 0)
    communicator.all_gather(x, "world", [torch.empty_like(x) for _ in range(world.size)])
    seen.append(communicator.begun)
    return seen


def stay_away(communicator: Communicator, world: World, *, absent: int, kind: str) -> str:
    """All but one rank begin a call; what they are told."""
    x = torch.ones(5, device=world.device)
    communicator.all_reduce(x, "world")
    if world.rank == absent:
        return ""
    try:
        for _ in range(1000):  # a send may return before it is met
            begin_call(communicator, world, kind, x, absent)
    except CommunicatorError as error:
        assert set(error.ranks) <= {absent}, f"{error.ranks} are said to be missing, and {absent} is"
        return str(error)
    return "it came to its end"


def begin_call(communicator: Communicator, world: World, kind: str, x: Tensor, other: int) -> None:
    parts = [torch.empty_like(x) for _ in range(world.size)]
    if kind == "all_reduce":
        communicator.all_reduce(x, "world")
    elif kind == "all_gather":
        communicator.all_gather(x, "world", parts)
    elif kind == "reduce_scatter":
        communicator.reduce_scatter(x, "world", [5, *[0] * (world.size - 1)])
    elif kind == "all_to_all":
        communicator.all_to_all(parts, "world", parts)
    elif kind == "broadcast":
        communicator.broadcast(x, "world", other)
    else:
        communicator.recv(x, other)


def wait_and_be_stopped(communicator: Communicator, world: World) -> list[str]:
    """Rank 0 never comes; the others are stopped from another thread. What two calls in a row say then."""
    x = torch.ones(5, device=world.device)
    communicator.all_reduce(x, "world")
    if world.rank == 0:
        return []
    stopper = threading.Thread(target=_stop_second_call, args=(communicator,), daemon=True)
    stopper.start()
    said = []
    try:
        for _ in range(2):
            try:
                communicator.all_reduce(x, "world")
            except CommunicatorError as error:
                said.append(str(error))
    finally:
        stopper.join()
    return said


def _stop_second_call(communicator: Communicator) -> None:
    while communicator.begun < 2:
        time.sleep(0.001)
    communicator.abort("enough of this")


def do_nothing(communicator: Communicator, world: World) -> None:
    """Only to start and to close."""


def wrong_calls(communicator: Communicator, world: World) -> list[str]:
    """What is said of calls that cannot be."""
    x = torch.ones(4, device=world.device)
    calls: dict[str, Callable[[], object]] = {
        "an unknown group": lambda: communicator.all_reduce(x, "nobody"),
        "a sum of integers": lambda: communicator.all_reduce(x.long(), "world"),
        "counts that do not add up": lambda: communicator.reduce_scatter(x, "world", [3] * world.size),
        "too few parts": lambda: communicator.all_gather(x, "world", [torch.empty_like(x)] * (world.size - 1)),
        "a source from nowhere": lambda: communicator.broadcast(x, "world", world.size),
    }
    wrong = []
    for what, call in calls.items():
        try:
            call()
        except (TypeError, ValueError):
            continue
        except CommunicatorError as error:
            wrong.append(f"{what}: {error}")
        else:
            wrong.append(f"{what} was accepted")
    communicator.all_reduce(x, "world")
    return wrong


class CommunicatorConformance:
    """What the core relies on."""

    device = "cpu"
    sizes: tuple[int, ...] = (2, 3)
    timeout_s = 20.0
    """Of calls that are to come to their end."""
    soon_s = 0.5
    """Of those that are not."""
    counts = COUNTS
    names_ranks = True
    """Errors say which ranks did not take part. False: of one that cannot know."""
    can_abort = True
    """``abort`` ends the call in hand. False: of one that leaves it to its deadline."""

    def make(self) -> Communicator:
        """A fresh communicator."""
        raise NotImplementedError(f"{type(self).__name__} must define make(self)")

    def device_of(self, rank: int) -> str:
        """A torch device string."""
        return self.device

    def run(
        self, job: Job, size: int, groups: Groups | None = None, timeout_s: float | None = None, absent: int = -1
    ) -> list[Any]:
        """What ``job`` returns on each rank, or the exception that it, or ``start``, raises there. ``absent``: a rank
        that never starts."""
        all_groups = groups or {"world": tuple(range(size))}
        made, results = [self.make() for _ in range(size)], [None] * size
        worlds = [self.world(rank, size, all_groups, timeout_s or self.timeout_s) for rank in range(size)]
        invitation = made[0].invite(worlds[0])

        def act(rank: int) -> None:
            results[rank] = act_as(made[rank], worlds[rank], invitation, job)

        threads = [threading.Thread(target=act, args=(i,), daemon=True) for i in range(size) if i != absent]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(NEVER_S)
            assert not thread.is_alive(), "a call hangs"
        for communicator in made:
            communicator.close()
        return results

    def world(self, rank: int, size: int, groups: Groups, timeout_s: float) -> World:
        mine = {name: ranks for name, ranks in groups.items() if rank in ranks}
        return World(rank, size, mine, self.device_of(rank), timeout_s)

    def results(self, job: Job, size: int, groups: Groups | None = None) -> list[Any]:
        """What ``job`` returns on each rank, which raises nowhere."""
        found = self.run(job, size, groups)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found

    def check(self, job: Job, groups: Groups | None = None) -> None:
        """``job`` finds nothing wrong, with any number of ranks."""
        for size in self.sizes:
            wrong = [line for lines in self.results(job, size, groups) for line in lines]
            assert not wrong, f"{size} ranks: {'; '.join(wrong[:5])}"

    def test_it_fulfils_the_contract(self) -> None:
        made = self.make()
        assert isinstance(made, Communicator), lacking(made, Communicator)
        assert type(made.capturable) is bool and type(made.same_bits) is bool
        assert made.begun == 0
        made.close()

    def test_sums_are_made_in_rank_order_and_rounded_once(self) -> None:
        """Or ranks would choose different tokens; without ``same_bits``, up to rounding."""
        self.check(partial(sum_all, counts=self.counts, exact=self.make().same_bits))

    def test_sums_keep_their_shape(self) -> None:
        self.check(sum_of_shape)

    def test_gathered_tensors_lie_in_rank_order(self) -> None:
        self.check(gather_all)

    def test_scattered_sums_are_those_of_each_ranks_rows(self) -> None:
        self.check(partial(scatter_sums, exact=self.make().same_bits))

    def test_every_rank_gets_what_was_sent_to_it(self) -> None:
        self.check(exchange_all)

    def test_broadcasts_are_those_of_their_source(self) -> None:
        self.check(broadcast_all)

    def test_messages_arrive_in_order_and_may_be_overwritten_once_they_are_sent(self) -> None:
        self.check(pass_on)
        self.check(send_all_then_receive)

    def test_calls_on_several_groups_do_not_mix(self) -> None:
        for size, seed in ((3, 1), (4, 2)):
            if size > max(self.sizes) + 1:
                continue
            groups = {"world": tuple(range(size)), "tp": tuple(range(size)), "low": (0, 1), "high": (1, size - 1)}
            job = partial(any_sequence, seed=seed, length=60, groups=groups)
            wrong = [line for lines in self.results(job, size, groups) for line in lines]
            assert not wrong or not self.make().same_bits, "; ".join(wrong[:5])

    def test_calls_are_counted_when_they_begin(self) -> None:
        for size in self.sizes:
            assert self.results(count_calls, size) == [[0, 1, 3]] * size

    def test_a_rank_that_does_not_come_ends_every_call_in_an_error(self) -> None:
        size = max(self.sizes)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "recv"):
            job, absent = partial(stay_away, absent=size - 1, kind=kind), size - 1
            found = self.run(job, size, timeout_s=self.soon_s)
            for rank, said in enumerate(found):
                assert isinstance(said, str), f"{kind}: rank {rank} raised {said!r}"
                assert rank == absent or said != "it came to its end", f"{kind}: rank {rank} did without rank {absent}"
                if self.names_ranks:
                    assert rank == absent or f"rank {absent}" in said, f"{kind}: {said}"

    def test_a_start_without_a_rank_ends_in_an_error(self) -> None:
        size = max(self.sizes)
        found = self.run(do_nothing, size, timeout_s=self.soon_s, absent=size - 1)
        for rank, error in enumerate(found[:-1]):
            assert isinstance(error, CommunicatorError), f"rank {rank} returned from start()"
            assert set(error.ranks) <= {size - 1}, f"{error.ranks} are said to be missing, and {size - 1} is"
            assert not self.names_ranks or f"rank {size - 1}" in str(error), str(error)

    def test_an_abort_ends_the_call_in_hand_and_all_later_ones(self) -> None:
        size = max(self.sizes)
        timeout_s = NEVER_S if self.can_abort else self.soon_s
        for rank, said in enumerate(self.run(wait_and_be_stopped, size, timeout_s=timeout_s)):
            if rank > 0:
                assert isinstance(said, list) and len(said) == 2, f"rank {rank}: {said}"
                assert not self.can_abort or "enough of this" in said[0], said[0]

    def test_calls_that_cannot_be_are_refused_and_change_nothing(self) -> None:
        self.check(wrong_calls)

    def test_one_that_was_never_started_can_be_closed_and_so_can_a_closed_one(self) -> None:
        made = self.make()
        made.abort("not needed")
        made.close()
        made.close()

    def test_nothing_is_left_behind(self) -> None:
        size = max(self.sizes)
        self.run(sum_of_shape, size)  # whatever is made once
        before = held()
        for _ in range(3):
            self.run(sum_of_shape, size)
            self.run(do_nothing, size, timeout_s=self.soon_s, absent=size - 1)
        left = held()
        assert left[0] <= before[0], f"open files: {before[0]}, and {left[0]} afterwards"
        assert left[1] <= before[1], f"shared memory: {before[1]} maps, and {left[1]} afterwards"


class NativeConformance(CommunicatorConformance):
    """For communicators with :class:`~engine.contracts.communicator.NativeCommunicator`."""

    def test_native_sums_are_those_of_all_reduce(self) -> None:
        assert isinstance(self.make(), NativeCommunicator)
        self.check(partial(native_sums, counts=self.counts))

    def test_a_native_call_that_fails_is_told_later_and_those_after_it_do_not_wait(self) -> None:
        size = max(self.sizes)
        for rank, said in enumerate(self.run(native_failure, size, timeout_s=self.soon_s)):
            assert isinstance(said, str), f"rank {rank} raised {said!r}"
            assert rank == 0 or "rank 0" in said, f"rank {rank}: {said}"


def native_sums(communicator: Communicator, world: World, *, counts: Sequence[int]) -> list[str]:
    """Programs of native sums, each call made more than once, among others."""
    assert isinstance(communicator, NativeCommunicator)
    wrong = []
    for dtype in SUMMED:
        for count in counts:
            parts = [sample(100 * rank + count, (count,), dtype, world.device) for rank in range(world.size)]
            first, second = torch.empty_like(parts[0]), torch.empty_like(parts[0])
            program = in_one([communicator.all_reduce_call(x, "world") for x in (first, second, second)])
            for _ in range(2):
                first.copy_(parts[world.rank])
                second.copy_(parts[world.rank])
                program()
                communicator.check()
                once = in_rank_order(parts)
                twice = in_rank_order([once] * world.size)
                if not same_bits(first, once) or not same_bits(second, twice):
                    wrong.append(f"native all_reduce of {count} {dtype} on rank {world.rank} is another sum")
            x = communicator.all_reduce(parts[world.rank].clone(), "world")
            if not same_bits(x, once):
                wrong.append(f"all_reduce of {count} {dtype} after native ones on rank {world.rank} is another sum")
    return wrong


def native_failure(communicator: Communicator, world: World) -> str:
    """Rank 0 stays away from a program of 2,000 calls; what the others are told."""
    assert isinstance(communicator, NativeCommunicator)
    x = torch.ones(5, device=world.device)
    communicator.all_reduce(x, "world")
    communicator.check()
    if world.rank == 0:
        return ""
    in_one([communicator.all_reduce_call(x, "world")] * 2000)()
    try:
        communicator.check()
    except CommunicatorError as error:
        return str(error)
    return "check() says nothing"


def held() -> tuple[int, int]:
    """How many files this process has open, and how many pieces of memory it shares, as far as the system says."""
    gc.collect()  # errors hold what they passed on their way
    files, maps = Path("/proc/self/fd"), Path("/proc/self/maps")
    shared = [line for line in maps.read_text().splitlines() if line.split()[1][3] == "s"] if maps.exists() else []
    return len(os.listdir(files)) if files.is_dir() else 0, len(shared)


def act_as(communicator: Communicator, world: World, invitation: str, job: Job) -> Any:
    """One rank: what ``job`` returns, or what was raised. It is closed when all ranks have come so far."""
    try:
        with torch.inference_mode():
            communicator.start(world, invitation)
            return job(communicator, world)
    except Exception as error:
        return error


def suite_for(subject: Subject) -> Suite:
    """For ``engine plugins check``: of what the communicator offers."""
    native = isinstance(subject.tried(subject.build), NativeCommunicator)
    suite = NativeConformance if native else CommunicatorConformance
    return filled(subject, [suite], make=lambda self: subject.build())
