"""Long work is done one piece at a time, fairly between clients, and what waits for it is bounded."""

import asyncio
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.service.addresses import network_of
from engine.service.errors import ApiError
from engine.service.one_at_a_time import OneAtATime


def on_a_loop(test):
    @functools.wraps(test)
    def run():
        asyncio.run(test())

    return run


@on_a_loop
async def test_a_client_with_much_work_keeps_another_waiting_for_one_piece_of_it():
    queue, done = OneAtATime("text", 1000), []
    first = asyncio.Event()

    async def work(client, size):
        async with queue.hold(client, size):
            await first.wait()
            done.append(client)

    flood = [asyncio.create_task(work("many", 10)) for _ in range(20)]
    await asyncio.sleep(0)
    one = asyncio.create_task(work("one", 10))
    await asyncio.sleep(0)
    first.set()
    await asyncio.gather(one, *flood)
    assert done.index("one") <= 1 and len(done) == 21


@on_a_loop
async def test_more_than_may_wait_is_refused_but_never_the_only_piece_of_a_client():
    queue = OneAtATime("text", 100)
    async with queue.hold("a", 500):
        with pytest.raises(ApiError) as refusal:
            async with queue.hold("a", 1):
                pass
        assert refusal.value.kind == "overloaded"
        waiting = asyncio.create_task(queue._begin("b", 500))
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting
    queue._end("b", 500)
    async with queue.hold("a", 1):
        pass


@on_a_loop
async def test_who_leaves_passes_the_turn_on():
    queue = OneAtATime("text", 100)
    tasks = []

    async def work():
        async with queue.hold("a", 1):
            await asyncio.sleep(0)

    async with queue.hold("b", 1):
        tasks = [asyncio.create_task(work()) for _ in range(5)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[3].cancel()
        await asyncio.sleep(0)
    tasks[1].cancel()  # at the moment when it has the turn
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(end, asyncio.CancelledError) for end in ended] == [True, True, False, True, False]
    async with asyncio.timeout(5), queue.hold("c", 1):
        assert queue._sizes == {"c": 1}


@on_a_loop
async def test_work_that_nobody_waits_for_any_more_ends_before_the_next_begins():
    queue, pool, running, go = OneAtATime("text", 100), ThreadPoolExecutor(2), threading.Event(), threading.Event()

    def slow():
        running.set()
        go.wait(10)

    left = asyncio.create_task(queue.run("a", 1, pool, slow))
    while not running.is_set():
        await asyncio.sleep(0.001)
    left.cancel()
    after = asyncio.create_task(queue.run("b", 1, pool, int))
    await asyncio.sleep(0.01)
    assert left.cancelled() and not after.done()
    go.set()
    assert await after == 0
    pool.shutdown()


@pytest.mark.parametrize(
    "address, network",
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("/run/engine.sock", "/run/engine.sock"),
    ],
)
def test_a_client_of_ipv6_is_its_network(address, network):
    assert network_of(address) == network
