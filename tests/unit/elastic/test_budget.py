"""How many crashes a run bears, and when the task is to blame."""

from __future__ import annotations

from raytrain_app.elastic.budget import SAME_STEP_LIMIT, FailureBudget


def test_crashes_are_borne_up_to_the_limit() -> None:
    budget = FailureBudget(max_restarts=2)
    assert [budget.crash(clock, 0) for clock in (10, 20)] == [None, None]
    reason = budget.crash(30, 0)
    assert reason is not None
    assert "crashed 3 times, and failure.max_restarts is 2" in reason


def test_a_budget_of_zero_bears_none() -> None:
    assert FailureBudget(max_restarts=0).crash(5, 0) is not None


def test_crashes_without_a_step_between_blame_the_task() -> None:
    budget = FailureBudget(max_restarts=100)
    reasons = [budget.crash(7, 0) for _ in range(SAME_STEP_LIMIT)]
    assert reasons[:-1] == [None] * (SAME_STEP_LIMIT - 1)
    assert reasons[-1] is not None
    assert f"died {SAME_STEP_LIMIT} times without a step between" in reasons[-1]


def test_a_step_between_crashes_starts_the_count_anew() -> None:
    budget = FailureBudget(max_restarts=100)
    clocks = [step for step in range(3) for _ in range(SAME_STEP_LIMIT - 1)]
    assert [budget.crash(clock, 0) for clock in clocks] == [None] * len(clocks)
    assert budget.used == len(clocks)


def test_all_that_die_in_one_generation_are_one_crash() -> None:
    budget = FailureBudget(max_restarts=1)
    assert [budget.crash(10, 3) for _ in range(8)] == [None] * 8
    assert budget.used == 1
    assert budget.crash(20, 4) is not None


def test_crashes_before_the_first_step_count_alike() -> None:
    budget = FailureBudget(max_restarts=100)
    assert [budget.crash(-1, 0) is None for _ in range(SAME_STEP_LIMIT)] == [True] * (SAME_STEP_LIMIT - 1) + [False]
