from engine.loop.ledger import InFlight, Ledger
from engine.step.plan import StepPlan


def step(plan_id):
    return InFlight(StepPlan(plan_id, (), ()), (), lambda: None, 0.0, 0.0, 0, True, ())


def test_what_a_plan_used_is_given_back_when_that_plan_has_retired_in_order():
    ledger, given = Ledger(), []
    for plan_id in range(3):
        ledger.launched(step(plan_id))
    ledger.after(2, lambda: given.append("c"))
    ledger.after(0, lambda: given.append("a"))
    ledger.after(1, lambda: given.append("b"))
    assert given == [] and len(ledger) == 3
    seen = []
    while ledger:
        assert ledger.oldest().plan.plan_id == len(seen)
        ledger.retire()
        seen.append(list(given))
    assert seen == [["a"], ["a", "b"], ["a", "b", "c"]]


def test_what_no_plan_in_flight_uses_is_given_back_at_once():
    ledger, given = Ledger(), []
    ledger.after(-1, lambda: given.append("never used"))
    ledger.launched(step(0))
    ledger.retire()
    ledger.after(0, lambda: given.append("retired"))
    assert given == ["never used", "retired"]
