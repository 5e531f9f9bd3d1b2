from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from engine.contracts.events import DroppedEvent, Event, RejectedEvent
from engine.contracts.exporter import Transcript
from engine.service import bus as bus_module
from engine.service.bus import EventBus

from .fakes import MemoryExporter


def events(count: int) -> list[Event]:
    return [RejectedEvent(float(i), 429, "full") for i in range(count)]


class Broken(MemoryExporter):
    calls = 0

    def export(self, events: Sequence[Event]) -> None:
        self.calls += 1
        raise OSError("disk full")


class Blocked(MemoryExporter):
    def __init__(self) -> None:
        super().__init__()
        self.entered, self.release = threading.Event(), threading.Event()

    def export(self, events: Sequence[Event]) -> None:
        self.entered.set()
        assert self.release.wait(10)
        super().export(events)


def test_events_arrive_in_order_and_the_rest_on_close() -> None:
    exporter = MemoryExporter()
    bus = EventBus([exporter])
    for event in events(100):
        bus.publish((event,))
    bus.close()
    assert exporter.events == events(100) and exporter.closed


def test_transcripts_go_to_those_who_look_at_token_ids_before_the_events_after_them() -> None:
    class Reader(MemoryExporter):
        def transcripts(self, ended: Sequence[Transcript]) -> None:
            self.events += ended  # type: ignore[arg-type]

    reader, other = Reader(), MemoryExporter()
    bus = EventBus([reader, other])
    transcript = Transcript("r", (1, 2), (3,), "")
    bus.transcribe(transcript)
    bus.publish(events(1))
    bus.close()
    assert bus.wants_transcripts and not EventBus([other]).wants_transcripts
    assert reader.events == [transcript, *events(1)] and other.events == events(1)


def test_an_exporter_that_keeps_raising_is_cut_off_and_the_others_go_on() -> None:
    broken, fine = Broken(), MemoryExporter()
    bus = EventBus([broken, fine])
    for event in events(5):
        bus.publish((event,))
        bus.settled(lambda: None)
    bus.close()
    assert (broken.calls, bus.cut_off) == (3, ["Broken"]) and len(fine.events) == 5


def test_a_slow_exporter_costs_events_and_they_are_counted() -> None:
    slow = Blocked()
    bus = EventBus([slow], max_pending=10)
    bus.publish(events(1))
    assert slow.entered.wait(10)
    bus.publish(events(25))
    assert bus.dropped == 15
    slow.release.set()
    bus.close()
    *delivered, report = slow.events
    assert len(delivered) == 11
    assert isinstance(report, DroppedEvent) and report.num_events == 15


def test_an_exporter_that_does_not_return_keeps_nobody_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_module, "CLOSE_S", 0.02)
    blocked, fine = Blocked(), MemoryExporter()
    bus = EventBus([blocked, fine])
    bus.publish(events(1))
    assert blocked.entered.wait(10)
    given_up, kept = bus.read(lambda: 1), bus.read(lambda: len(fine.events))
    assert not kept.done() and given_up.cancel()
    bus.close()
    blocked.release.set()
    assert kept.result(10) == 1


def test_what_fails_while_it_reads_is_told_to_who_reads() -> None:
    bus = EventBus([MemoryExporter()])
    with pytest.raises(ZeroDivisionError):
        bus.settled(lambda: 1 // 0)
    assert bus.settled(lambda: 1) == 1
    bus.close()
