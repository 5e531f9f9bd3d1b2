"""Sequences that arrive while a step runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from engine.contracts.constraint import Grammar
from engine.contracts.events import AdmittedEvent, StepEvent
from engine.contracts.request import EngineRequest, SamplingParams, TokensOut
from engine.loop.driver import drive
from engine.loop.inbox import Inbox
from engine.loop.messages import Abort, EngineStats, StepOutputs, Submit
from engine.step.plan import StepPlan

from .simulated import simulate

STEP_MS = 100.0


def request(name: str) -> EngineRequest:
    return EngineRequest(name, (1, 2, 3), SamplingParams(max_tokens=3, temperature=0.0))


def test_a_sequence_waits_from_its_arrival_on_though_the_loop_reads_it_after_the_step() -> None:
    launched: list[StepPlan] = []

    def ms(plan: StepPlan) -> float:
        if not launched:
            inbox.put(Submit(request("second")))
        launched.append(plan)
        return STEP_MS

    simulation = simulate("overlap=false", in_flight=1, ms=ms)
    inbox = Inbox(simulation.device.clock)
    inbox.put(Submit(request("first")))
    assert inbox.unread() == 1
    events: list[Any] = []
    stats: list[EngineStats] = []
    last: dict[str, TokensOut] = {}

    def send(message: Any) -> None:
        assert isinstance(message, StepOutputs)
        events.extend(message.events)
        stats.append(message.stats)
        last.update({out.request_id: out for out in message.outputs})
        if "second" in last and last["second"].finish_reason:
            inbox.put(None)

    assert drive(simulation.core, inbox, send)
    assert [event.waiting for event in events if isinstance(event, StepEvent)][:2] == [1, 0]
    assert [each.waiting for each in stats[:3]] == [1, 1, 0], "the first waits before any step"
    waited = {event.request_id: event.waited_ms for event in events if isinstance(event, AdmittedEvent)}
    timings = {name: out.timings for name, out in last.items()}
    assert waited == pytest.approx({"first": 0.0, "second": STEP_MS})
    assert timings["first"] is not None and timings["first"].queue_ms == 0.0
    assert timings["second"] is not None and timings["second"].queue_ms == pytest.approx(STEP_MS)


def test_who_closes_its_end_during_a_step_ends_the_loop_without_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    simulation = simulate("overlap=false", in_flight=1, ms=lambda plan: STEP_MS)
    inbox = Inbox(simulation.device.clock)
    inbox.put(Submit(request("first")))
    sent: list[Any] = []

    def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 1:  # the first says how large the pool is
            inbox.put(None)
            raise BrokenPipeError

    assert drive(simulation.core, inbox, send)
    assert len(sent) == 2 and all(isinstance(message, StepOutputs) for message in sent)
    assert capsys.readouterr().err == ""


def test_what_is_no_sequence_does_not_count_as_waiting() -> None:
    inbox = Inbox()
    inbox.put(Abort(("one",)))
    inbox.put(Submit(request("one")))
    assert inbox.unread() == 1
    assert isinstance(inbox.get(block=False), Abort) and inbox.unread() == 1
    message = inbox.get(block=False)
    assert isinstance(message, Submit) and message.arrived_s > 0 and inbox.unread() == 0


def test_a_sequence_is_read_when_its_grammar_is_compiled_and_its_abort_after_it() -> None:
    inbox, compiled, proceed = Inbox(), list[Grammar](), threading.Event()

    def compile_(grammar: Grammar) -> None:
        proceed.wait(10)
        compiled.append(grammar)
        raise ValueError("the loop finds out by itself")

    inbox.compile = compile_
    grammar = Grammar("regex", "a")
    inbox.put(Submit(EngineRequest("slow", (1,), SamplingParams(grammar=grammar))))
    inbox.put(Abort(("slow", "other")))
    inbox.put(Submit(request("plain")))
    inbox.put(Abort(("plain",)))
    first, second = inbox.get(block=True), inbox.get(block=True)
    assert isinstance(first, Submit) and first.request.request_id == "plain" and isinstance(second, Abort)
    assert inbox.unread() == 1
    proceed.set()
    third, fourth = inbox.get(block=True), inbox.get(block=True)
    assert isinstance(third, Submit) and third.request.request_id == "slow" and compiled == [grammar]
    assert isinstance(fourth, Abort) and fourth.request_ids == ("slow", "other") and inbox.unread() == 0
