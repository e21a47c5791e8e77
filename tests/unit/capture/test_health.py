"""What a worker takes after its engine died: pauses that grow, probes, and a rest."""

import pytest

from service.capture.health import PAUSES, Health
from service.store import LeftOut, LoneDeath
from service.store.workers import is_at_fault

REST_S = 3600.0
SHORT_S, LONGER_S = (share * REST_S for share in PAUSES[:2])


@pytest.mark.parametrize(
    ("events", "deaths", "pause_s", "rests"),
    [
        ("", 0, 0.0, False),
        ("d", 1, SHORT_S, False),
        ("dd", 2, LONGER_S, False),
        ("ddd", 3, REST_S, True),
        ("dddd", 4, REST_S, True),
        ("dp", 0, 0.0, False),
        ("ddpd", 1, SHORT_S, False),
        ("dddpddd", 3, REST_S, True),
    ],
)
def test_pauses_grow_with_deaths_in_a_row_and_a_proven_unit_ends_the_row(
    events: str, deaths: int, pause_s: float, rests: bool
) -> None:
    health, now_s = Health(REST_S), 100.0
    for event in events:
        if event == "p":
            health.proven("m")
        else:
            health.died("m", "why", now_s)
    assert health.probes("m") is (deaths > 0)
    assert [engine.deaths for engine in health.report(now_s)] == [deaths] * (deaths > 0)
    assert [engine.rest_s > 0 for engine in health.report(now_s)] == [rests] * (deaths > 0)
    assert [engine.rest_s for engine in health.report(now_s + pause_s)] == [0.0] * (deaths > 0)
    if deaths:
        assert health.left_out(now_s + pause_s - 0.1).models == {"m"}
    assert health.left_out(now_s + pause_s).models == frozenset()


def test_a_model_does_not_answer_for_another() -> None:
    health = Health(REST_S)
    health.died("m", "why", 0.0)
    health.proven("n")
    assert (health.probes("m"), health.probes("n")) == (True, False)
    assert health.left_out(0.0).models == {"m"}


def test_a_unit_that_it_died_on_alone_comes_after_others_until_one_is_proven() -> None:
    health = Health(REST_S)
    health.died("m", "why", 0.0)
    health.died("m", "why", 0.0, "unit 3")
    assert health.left_out(REST_S) == LeftOut(subjects=frozenset({"unit 3"}))
    health.proven("m")
    assert health.left_out(0.0) == LeftOut()


@pytest.mark.parametrize(
    ("deaths", "only", "at_fault"),
    [
        ("", True, False),
        ("a", True, False),
        ("aa", True, False),
        ("aaaaaa", True, False),  # nothing was proven between: the worker's own fault, most likely
        ("aA", True, False),
        ("aAA", True, True),
        ("AA", True, False),
        ("aAAAA", False, False),  # another worker is to try it
        ("ab", False, False),
        ("aAb", False, False),
        ("AB", False, True),
        ("aAbB", False, True),
    ],
)
def test_a_unit_is_at_fault_if_two_workers_or_the_only_one_died_on_it_alone_and_proved_others(
    deaths: str, only: bool, at_fault: bool
) -> None:
    """A letter is a worker's death on it; a capital one came after that worker had proven another unit."""
    lone = [LoneDeath(worker=letter.lower(), sound=letter.isupper()) for letter in deaths]
    assert is_at_fault(lone, is_only_worker=only) is at_fault
