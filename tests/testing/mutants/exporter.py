"""Exporters with a bug each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.contracts.events import (
    Event,
    FirstTokenEvent,
    PrefixCacheEvent,
    RejectedEvent,
    RequestEvent,
    StepEvent,
    TokensEvent,
)
from engine.contracts.exporter import Exporter
from engine.testing.context import build_context
from engine.testing.exporter import ExporterConformance
from engine_plugins.exporter.config import PrometheusConfig
from engine_plugins.exporter.prometheus import PrometheusExporter
from tests.testing.mutants.mutant import OnPlugin, correct, mutant

ANY = "test_it_takes_every_kind_of_event"
ORDER = "test_it_takes_events_in_any_order_and_batches_of_any_size"
ZEROS = "test_it_takes_events_of_which_every_number_is_zero"
EMPTY = "test_it_can_be_closed_without_having_seen_anything"
SAME = "test_other_exporters_get_the_same_batch"
MANY = "test_one_batch_or_many_come_to_the_same"
BOUNDED = "test_a_page_stays_bounded_whatever_ids_and_reasons_occur"
TEXT = "test_a_page_is_prometheus_text_at_any_time"
AGAIN = "test_a_page_that_is_read_again_is_the_same"


class Lines:
    """A line for every request that ended, kept in memory until it is closed: a correct exporter."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.text = ""

    def export(self, events: Sequence[Event]) -> None:
        for event in events:
            self.on(event)

    def on(self, event: Event) -> None:
        if isinstance(event, RequestEvent):
            self.lines.append(f"{event.request_id} {event.output_tokens} {event.e2e_ms}")

    def close(self) -> None:
        self.text += "".join(f"{line}\n" for line in self.lines)
        self.lines.clear()


class LinesSuite(OnPlugin, ExporterConformance):
    def make(self) -> Any:
        return self.plugin()

    def written(self, exporter: Exporter) -> object:
        assert isinstance(exporter, Lines)
        return exporter.text


class Counted:
    """A page of a counter and a gauge: a correct exporter."""

    def __init__(self) -> None:
        self.values: dict[str, float] = dict.fromkeys(('rejected{model="m"}', 'running{model="m"}'), 0.0)

    def export(self, events: Sequence[Event]) -> None:
        for event in events:
            self.on(event)

    def on(self, event: Event) -> None:
        if isinstance(event, RejectedEvent):
            self.values['rejected{model="m"}'] += 1.0
        elif isinstance(event, StepEvent):
            self.values['running{model="m"}'] = float(event.running)

    def render(self) -> str:
        return "".join(f"{name} {value}\n" for name, value in self.values.items())

    def close(self) -> None:
        pass


class PageSuite(OnPlugin, ExporterConformance):
    def make(self) -> Any:
        return self.plugin()


class PrometheusSuite(OnPlugin, ExporterConformance):
    def make(self) -> Any:
        return self.plugin(PrometheusConfig(), build_context())


correct(LinesSuite, Lines)
correct(PageSuite, Counted)


@mutant(PageSuite, BOUNDED)
class SeriesOfRequests(Counted):
    """Has a series for every request id."""

    def on(self, event: Event) -> None:
        super().on(event)
        if isinstance(event, FirstTokenEvent):
            self.values[f'ttft{{request="{event.request_id}"}}'] = event.ttft_ms


@mutant(PageSuite, BOUNDED)
class SeriesOfReasons(Counted):
    """Has a series for every reason of a refusal, which clients can choose."""

    def on(self, event: Event) -> None:
        super().on(event)
        if isinstance(event, RejectedEvent):
            name = "".join(letter if letter.isalnum() else "_" for letter in event.reason)
            self.values[f'reasons{{reason="{name}"}}'] = 1.0


@mutant(PageSuite, BOUNDED)
class SeriesOfLengths(Counted):
    """Has a series for every length of an output."""

    def on(self, event: Event) -> None:
        super().on(event)
        if isinstance(event, RequestEvent):
            self.values[f'requests{{tokens="{event.output_tokens}"}}'] = 1.0


@mutant(PageSuite, TEXT)
class UnescapedLabels(Counted):
    """Writes the last reason into a label as it is."""

    def on(self, event: Event) -> None:
        super().on(event)
        if isinstance(event, RejectedEvent):
            self.values = {name: value for name, value in self.values.items() if not name.startswith("last")}
            self.values[f'last{{reason="{event.reason}"}}'] = 1.0


@mutant(PageSuite, TEXT)
class NoneAtFirst(Counted):
    """Writes None for what it has not seen yet."""

    def __init__(self) -> None:
        super().__init__()
        self.values['running{model="m"}'] = None  # type: ignore[assignment]


@mutant(PageSuite, TEXT)
class SeriesTwice(Counted):
    """Writes a series a second time once there is something to tell."""

    def render(self) -> str:
        page = super().render()
        return page + page.splitlines(keepends=True)[0] if self.values['rejected{model="m"}'] else page


@mutant(PageSuite, TEXT)
class LastLineOpen(Counted):
    """Does not end its last line."""

    def render(self) -> str:
        return super().render().rstrip("\n")


@mutant(PageSuite, AGAIN)
class ForgetsWhatWasRead(Counted):
    """Starts its counters again whenever somebody reads them."""

    def render(self) -> str:
        page = super().render()
        self.values = dict.fromkeys(self.values, 0.0)
        return page


@mutant(PageSuite, MANY)
class CountsBatches(Counted):
    """Counts one refusal for a batch, however many there are."""

    def export(self, events: Sequence[Event]) -> None:
        refused = [event for event in events if isinstance(event, RejectedEvent)]
        super().export([event for event in events if event not in refused[1:]])


@mutant(PrometheusSuite, ANY)
class KnownStatuses(PrometheusExporter):
    """Expects one of the statuses that the server returns today."""

    def export(self, events: Sequence[Event]) -> None:
        assert all(event.status in (400, 429, 503) for event in events if isinstance(event, RejectedEvent))
        super().export(events)


@mutant(PrometheusSuite, ANY)
class StepsAndRequests(PrometheusExporter):
    """Expects steps, requests and tokens, and no other kind of event."""

    def export(self, events: Sequence[Event]) -> None:
        assert all(isinstance(event, (StepEvent, RequestEvent, TokensEvent, FirstTokenEvent)) for event in events)
        super().export(events)


@mutant(LinesSuite, ORDER, raises=IndexError)
class LooksAtTheFirst(Lines):
    """Looks at the first event of a batch that may have none."""

    def export(self, events: Sequence[Event]) -> None:
        assert events[0].at_s >= 0.0
        super().export(events)


@mutant(LinesSuite, ORDER, raises=KeyError)
class StartsWithAFirstToken(Lines):
    """Expects a request's first token before its end, which may come in a batch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: dict[str, float] = {}

    def on(self, event: Event) -> None:
        if isinstance(event, FirstTokenEvent):
            self._begun[event.request_id] = event.at_s
        elif isinstance(event, RequestEvent):
            self._begun.pop(event.request_id)


@mutant(LinesSuite, ZEROS, raises=ZeroDivisionError)
class TokensPerSecond(Lines):
    """Divides tokens by a request's time in decode, of which a single token takes none."""

    def on(self, event: Event) -> None:
        if isinstance(event, RequestEvent):
            self.lines.append(f"{event.output_tokens / event.decode_ms:.1f}")


@mutant(LinesSuite, ZEROS, raises=ZeroDivisionError)
class HitRate(Lines):
    """Divides cached tokens by those that were looked up, of which there may be none."""

    def on(self, event: Event) -> None:
        if isinstance(event, PrefixCacheEvent):
            self.lines.append(f"{event.hits / event.queries:.0%}")


@mutant(LinesSuite, SAME)
class SortsTheBatch(Lines):
    """Sorts the events of a batch where they are, which other exporters get next."""

    def export(self, events: Sequence[Event]) -> None:
        if isinstance(events, list):
            events.sort(key=lambda event: type(event).__name__)
        super().export(events)


@mutant(LinesSuite, SAME)
class EmptiesTheBatch(Lines):
    """Takes events out of the batch one by one."""

    def export(self, events: Sequence[Event]) -> None:
        while isinstance(events, list) and events:
            self.on(events.pop(0))


@mutant(LinesSuite, EMPTY)
class ClosesWhatIsNotOpen(Lines):
    """Opens its file at the first event, and closes one that was never opened."""

    def close(self) -> None:
        assert self.lines
        super().close()


@mutant(LinesSuite, MANY)
class KeepsTheLastBatch(Lines):
    """Writes the last batch alone when it is closed."""

    def export(self, events: Sequence[Event]) -> None:
        self.lines.clear()
        super().export(events)


@mutant(
    LinesSuite,
    missed="only its author knows where an exporter writes to: `written` shows what was written, not what should be",
)
class NeverFlushes(Lines):
    """Drops what it has buffered when it is closed."""

    def close(self) -> None:
        self.lines.clear()


@mutant(PageSuite, AGAIN)
class TellsTheTime(Counted):
    """Writes into its page how often it was read."""

    def render(self) -> str:
        self.values["reads"] = self.values.get("reads", 0.0) + 1.0
        return super().render()
