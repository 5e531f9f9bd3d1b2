from engine.contracts.request import EngineRequest
from engine.loop.queues import Queues
from engine.loop.sequence import Sequence, Status


def sequence(name, arrival, priority=0):
    return Sequence(EngineRequest(name, (1,), priority=priority), arrival, 0, frozenset(), 9, 0.0, [1])


def names(sequences):
    return [s.request_id for s in sequences]


def test_smaller_priorities_and_earlier_arrivals_come_first_waiting_and_running():
    queues = Queues()
    for found in (late := sequence("late", 3), urgent := sequence("urgent", 2, -1), early := sequence("early", 1)):
        queues.add(found)
    assert names(queues.waiting) == ["urgent", "early", "late"]
    for found in (late, early, urgent):
        queues.start(found)
    assert names(queues.running) == ["urgent", "early", "late"] and not queues.waiting


def test_a_preempted_request_gets_its_old_place_back():
    queues = Queues()
    for found in (first := sequence("first", 1), sequence("second", 2)):
        queues.add(found)
    queues.start(first)
    queues.suspend(first)
    assert names(queues.waiting) == ["first", "second"] and first.status is Status.WAITING


def test_an_ended_request_is_nowhere_whether_it_ran_or_waited():
    queues = Queues()
    for found in (runs := sequence("runs", 1), waits := sequence("waits", 2)):
        queues.add(found)
    queues.start(runs)
    queues.finish(runs)
    queues.finish(waits)
    assert not queues.waiting and not queues.running and not queues.by_id
    assert runs.status is waits.status is Status.FINISHED
