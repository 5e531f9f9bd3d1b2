from __future__ import annotations

import threading
from collections.abc import Sequence

from engine.contracts.events import DroppedEvent, Event, RejectedEvent
from engine.serving.bus import EventBus

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
