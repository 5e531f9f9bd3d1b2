from msgspec import structs

from engine.contracts.request import EngineRequest
from engine.loop.queues import Queues
from engine.loop.sequence import Sequence, Status


def sequence(name, arrival, priority=0, client="", group="", prompt=1):
    request = EngineRequest(name, (1,) * prompt, priority=priority, client=client, group=group)
    return Sequence(request, arrival, 0, frozenset(), 9, 0.0, [1] * prompt)


def names(sequences):
    return [s.request_id for s in sequences]


def test_smaller_priorities_and_earlier_arrivals_come_first_waiting_and_running():
    queues = Queues(8)
    for found in (early := sequence("early", 1), late := sequence("late", 2), urgent := sequence("urgent", 3, -1)):
        queues.add(found)
    assert names(queues.waiting) == ["urgent", "early", "late"]
    for found in (late, early, urgent):
        queues.start(found)
    assert names(queues.running) == ["urgent", "early", "late"] and not queues.waiting


def test_a_preempted_request_gets_its_old_place_back():
    queues = Queues(8)
    for found in (first := sequence("first", 1), sequence("second", 2)):
        queues.add(found)
    queues.start(first)
    queues.suspend(first)
    assert names(queues.waiting) == ["first", "second"] and first.status is Status.WAITING


def test_an_ended_request_is_nowhere_whether_it_ran_or_waited():
    queues = Queues(8)
    for found in (runs := sequence("runs", 1), waits := sequence("waits", 2)):
        queues.add(found)
    queues.start(runs)
    queues.finish(runs)
    queues.finish(waits)
    assert not queues.waiting and not queues.running and not queues.by_id
    assert runs.status is waits.status is Status.FINISHED


def test_clients_that_wait_take_turns_however_many_sequences_each_of_them_sent():
    queues = Queues(8)
    for arrival in range(6):
        queues.add(sequence(f"many{arrival}", arrival, client="many"))
    queues.start(queues.waiting[0])
    for arrival in range(6, 8):
        queues.add(sequence(f"few{arrival - 6}", arrival, client="few"))
    assert names(queues.waiting) == ["few0", "many1", "few1", "many2", "many3", "many4", "many5"]


def test_clients_share_tokens_not_requests():
    """One sends prompts four times as long: of it comes one for four of the other."""
    queues = Queues(8)
    for arrival in range(3):
        queues.add(sequence(f"long{arrival}", arrival, client="long", prompt=40))
    for arrival in range(3, 11):
        queues.add(sequence(f"short{arrival - 3}", arrival, client="short", prompt=10))
    assert names(queues.waiting)[:7] == ["long0", "short0", "short1", "short2", "short3", "long1", "short4"]


def test_what_was_generated_counts_for_the_next_turn():
    queues = Queues(8)
    queues.add(sequence("keeps a place", 0, client="much"))
    for arrival, (client, outputs) in enumerate((("much", 50), ("little", 1)), start=1):
        queues.add(ended := sequence(client, arrival, client=client, prompt=10))
        queues.start(ended)
        ended.tokens += [2] * outputs
        queues.add(sequence(f"{client} waits", 10 + arrival, client=client))
        queues.finish(ended)
    for arrival, client in enumerate(("much", "little"), start=20):
        queues.add(sequence(f"{client} again", arrival, client=client))
    assert names(queues.waiting).index("little again") < names(queues.waiting).index("much again")


def test_a_client_that_comes_back_has_saved_up_no_turns_and_owes_none():
    queues = Queues(8)
    for arrival in range(3):
        queues.add(sequence(f"a{arrival}", arrival, client="a"))
    queues.add(sequence("b0", 3, client="b"))
    for waits in tuple(queues.waiting):
        queues.start(waits)
        queues.finish(waits)
    queues.add(sequence("a3", 4, client="a"))
    queues.add(sequence("b1", 5, client="b"))
    queues.add(sequence("a4", 6, client="a"))
    assert names(queues.waiting) == ["a3", "b1", "a4"]


def test_what_another_engine_has_begun_comes_first_and_counts_there():
    queues = Queues(8)
    for arrival in range(3):
        queues.add(sequence(f"new{arrival}", arrival, client="one", prompt=10))
    queues.start(queues.waiting[0])
    begun = sequence("begun", 3, client="two", prompt=10)
    begun.request = structs.replace(begun.request, output=(1,) * 50)
    begun.tokens += [1] * 52
    queues.add(begun)
    assert names(queues.waiting) == ["begun", "new1", "new2"]
    queues.add(sequence("next", 4, client="two", prompt=10))
    queues.finish(begun)
    queues.add(sequence("last", 5, client="two", prompt=10))
    assert names(queues.waiting) == ["next", "new1", "last", "new2"]


def test_one_client_alone_is_served_first_come_first_served():
    queues = Queues(8)
    for arrival in range(20):
        queues.add(sequence(f"r{arrival:02}", arrival, client="only"))
        if arrival % 3 == 0:
            queues.start(queues.waiting[0])
    started = [*names(queues.running), *names(queues.waiting)]
    assert started == sorted(started)


def test_no_api_request_holds_all_rows():
    queues = Queues(8)
    for arrival in range(9):
        queues.add(sequence(f"choice{arrival}", arrival, client="many", group="api"))
    assert len(queues.admissible()) == 7
    for admitted in queues.admissible():
        queues.start(admitted)
    queues.add(sequence("other", 9, client="few"))
    assert names(queues.admissible()) == ["other"]
    queues.finish(queues.running[0])
    assert len(queues.admissible()) == 2
    queues.suspend(queues.running[-1])
    assert len(queues.admissible()) == 3


def test_an_api_request_of_many_sequences_runs_where_there_is_one_row():
    queues = Queues(1)
    for arrival in range(2):
        queues.add(sequence(f"choice{arrival}", arrival, group="api"))
    assert len(queues.admissible()) == 1
