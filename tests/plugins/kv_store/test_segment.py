"""Records in memory that outlives the engine that writes them."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
from hashlib import sha256

from engine.contracts.kv_store import RecordLayout
from engine.testing.context import build_context
from engine.testing.kv_store import LAYOUT, files_in_memory, wait_until
from engine_plugins.kv_store.host import HostConfig, HostStore
from engine_plugins.kv_store.segment import LAST, WIDTH, Others, Segment, Shape

SHAPE = Shape(RecordLayout(LAYOUT.namespace, (50_000,)), 8)
WRITER = """
import itertools, sys, time
from tests.plugins.kv_store.test_segment import SHAPE, key_of, record_of
from engine_plugins.kv_store.segment import Segment
segment = Segment(int(sys.argv[1]), SHAPE)
for number in itertools.count(int(sys.argv[2])):
    slot = number % SHAPE.slots
    segment.begin(0, slot)
    segment.groups[0][slot * 50_000 : (slot + 1) * 50_000] = record_of(number)
    segment.publish(0, slot, key_of(number))
    if slot == SHAPE.slots - 1:
        while not segment._mapped.marks[slot * 8]:
            time.sleep(0)
        print(number, flush=True)
        sys.stdin.read(1)
"""


def key_of(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def record_of(number: int) -> bytes:
    return random.Random(number).randbytes(50) * 1000


def test_a_reader_and_the_next_engine_get_whole_records_of_a_writer_that_is_killed() -> None:
    """It overwrites all slots while they are read, and is killed then or while it waits."""
    draw, first = random.Random(5), 0
    with files_in_memory(1) as files:
        for waits in (False, True):
            command = [sys.executable, "-c", WRITER, str(files[0]), str(first)]
            with subprocess.Popen(command, pass_fds=files, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None and process.stdin is not None
                for _ in range(draw.randrange(20, 60)):
                    written = int(process.stdout.readline())
                    numbers = [*range(written, written - SHAPE.slots, -1)]
                    ids, expected = [(0, key_of(number)) for number in numbers], [*map(record_of, numbers)]
                    assert read_by_another(files[0], ids) == expected
                    process.stdin.write(b"x")
                    process.stdin.flush()
                    read = read_by_another(files[0], ids)
                    assert read == expected[: len(read)]
                if waits:
                    written = int(process.stdout.readline())
                process.send_signal(signal.SIGKILL)
            segment = Segment(files[0], SHAPE)
            found, damaged = segment.found()
            by_key = {key_of(number): number for number in range(first, written + SHAPE.slots + 1)}
            assert damaged == 0 and (not waits or len(found) == SHAPE.slots)
            for _, slot, key in found:
                assert segment.groups[0][slot * 50_000 : (slot + 1) * 50_000] == record_of(by_key[key])
            segment.close(1.0)
            first = written + SHAPE.slots + 1


def read_by_another(file: int, ids: list[tuple[int, bytes]], shape: Shape = SHAPE) -> list[bytearray]:
    """The records that were whole, up to the first that was not."""
    others, ended = Others([file], shape, lambda: None), list[tuple[int, int]]()
    into = [bytearray(shape.layout.num_bytes[group]) for group, _ in ids]
    others.open(shape.layout, lambda: None)
    others.get(ids, [memoryview(buffer) for buffer in into])

    def has_ended() -> bool:
        ended.extend(others.poll())
        return bool(ended)

    wait_until(has_ended, "the read did not end")
    others.close(1.0)
    return into[: ended[0][1]]


def opened(files: tuple[int, ...], own: int, layout: RecordLayout = LAYOUT) -> HostStore:
    store = HostStore(HostConfig(max_bytes=1 << 20), build_context())
    store.share(files, own)
    store.open(layout, lambda: None)
    if (others := store.others()) is not None:
        others.open(layout, lambda: None)
    return store


def add(store: HostStore, key: bytes, begins: bytes = b"") -> int:
    slot = store.room(0, key)
    assert slot is not None
    size = len(store.memory(0)) // store.num_slots
    store.memory(0)[slot * size : slot * size + len(begins)] = begins
    store.publish(0, slot)
    return slot


def test_a_damaged_record_is_not_taken_over_and_counted() -> None:
    with files_in_memory(1) as files:
        store = opened(files, 0)
        slots = [add(store, key_of(number)) for number in range(3)]
        store.close(1.0)
        store.memory(0)[slots[1] * LAYOUT.num_bytes[0]] ^= 1
        again = opened(files, 0)
        assert [again.find(0, key_of(number)) for number in range(3)] == [slots[0], None, slots[2]]
        assert again.usage().faults == 1
        again.check()
        again.close(1.0)


def test_whatever_a_broken_engine_has_left_others_and_the_next_one_go_on() -> None:
    draw, keys = random.Random(11), [key_of(number) for number in range(40)]
    with files_in_memory(2) as files:
        reader = opened(files, 1)
        others = reader.others()
        assert others is not None
        for _ in range(12):
            writer = opened(files, 0)
            for key in keys:
                if writer.find(0, key) is None:
                    add(writer, key, key)
            writer.close(1.0)
            with mmap.mmap(files[0], os.fstat(files[0]).st_size) as memory:
                for _ in range(draw.randrange(1, 30)):
                    at = draw.randrange(256, len(memory) - 64) if draw.random() < 0.5 else draw.randrange(2048, 36_000)
                    size = draw.choice([1, 4, 8, 64])
                    memory[at : at + size] = draw.choice([draw.randbytes(size), bytes(size), b"\xff" * size])
            for key in keys:
                if others.has(0, key):
                    read = read_by_another(files[0], [(0, key)], Shape(LAYOUT, writer.num_slots))
                    assert [each[:32] for each in read] in ([], [key])
            again = opened(files, 0)
            for key in keys:
                slot = again.find(0, key)
                assert slot is None or again.memory(0)[slot * 4096 : slot * 4096 + 32] == key
            again.check()
            again.close(1.0)
        reader.close(1.0)


def test_an_engine_whose_table_was_damaged_goes_on_to_share() -> None:
    with files_in_memory(2) as files:
        writer, reader = opened(files, 0), opened(files, 1)
        segment, others, key = writer._segment, reader.others(), key_of(0)
        assert segment is not None and others is not None
        damaged = segment.shape.headers - mmap.PAGESIZE
        os.pwrite(files[0], b"\xff" * damaged, mmap.PAGESIZE)
        os.pwrite(files[0], b"\xff" * 8, LAST * 8)
        add(writer, key)
        writer.close(1.0)
        assert others.has(0, key)
        reader.close(1.0)


def test_the_oldest_of_an_earlier_engine_make_way_first() -> None:
    with files_in_memory(1) as files:
        layout = RecordLayout(LAYOUT.namespace, (1 << 18,))
        store = opened(files, 0, layout)
        for number in range(6):
            add(store, key_of(number))
        store.close(1.0)
        again = opened(files, 0, layout)
        add(again, key_of(6))
        assert [again.find(0, key_of(number)) is not None for number in range(7)] == [False] * 3 + [True] * 4
        again.close(1.0)


def test_another_namespace_gives_the_memory_of_the_former_back() -> None:
    with files_in_memory(1) as files:
        store = opened(files, 0)
        for number in range(100):
            add(store, key_of(number), bytes([1]) * 4096)
        store.close(1.0)
        before = os.fstat(files[0]).st_blocks * 512
        opened(files, 0, RecordLayout(bytes(32), (2048,))).close(1.0)
        assert before > 100 * 4096 and os.fstat(files[0]).st_blocks * 512 < 100 * 4096


def test_copies_of_others_records_stay_as_long_as_they_are_held() -> None:
    with files_in_memory(2) as files:
        writer, reader = opened(files, 0), opened(files, 1)
        key, others = key_of(0), reader.others()
        add(writer, key)
        assert others is not None
        wait_until(lambda: others.has(0, key), "not counted")
        slot = reader.room(0, key)
        assert slot is not None
        others.get([(0, key)], [reader.memory(0)[slot * 4096 : (slot + 1) * 4096]])
        wait_until(lambda: bool(others.poll()), "the read did not end")
        reader.publish(0, slot)
        reader.hold(0, [slot])
        others.poll()
        assert reader.find(0, key) == slot
        reader.check()
        reader.let_go(0, [slot])
        others.poll()
        assert reader.find(0, key) is None and others.has(0, key)
        reader.check()
        reader.close(1.0)
        assert opened(files, 1).usage().records == 0, "a copy was left to the next engine"
        writer.close(1.0)


def test_a_table_that_is_full_in_one_place_loses_records_for_others_alone() -> None:
    shape = Shape(RecordLayout(bytes(32), (64,)), 32)
    keys = [bytes(8) + key_of(number)[8:] for number in range(shape.slots)]
    with files_in_memory(1) as files:
        segment = Segment(files[0], shape)
        for slot, key in enumerate(keys):
            segment.begin(0, slot)
            segment.publish(0, slot, key)
        segment.close(1.0)
        others = Others(files, shape, lambda: None)
        found = [others.has(0, key) for key in keys]
        assert sum(found) == WIDTH and found[-1]
        again = Segment(files[0], shape)
        assert len(again.found()[0]) == shape.slots
        again.close(1.0)
        others.close(1.0)
