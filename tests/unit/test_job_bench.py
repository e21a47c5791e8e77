"""The arithmetic of what a job's time goes to; no engine, and no claim about a time."""

import re

import pytest

from benchmarks.job import Call, calls, report, shares


def test_the_record_is_read_as_it_is_written() -> None:
    lines = ["execute_model 1.5 2.0 7 0\n", "check 2.0 2.25 0 0.5\n"]
    assert calls(lines) == [Call("execute_model", 1.5, 2.0, 7), Call("check", 2.0, 2.25, 0, 0.5)]


def test_idle_is_what_lies_between_the_calls_of_computing_steps() -> None:
    record = [
        Call("execute_model", 0.0, 0.1, 0),  # before the first step with tokens: not of the job
        Call("execute_model", 10.0, 13.0, 100),
        Call("sample_tokens", 13.5, 14.0, 0),
        Call("execute_model", 14.5, 15.0, 0),  # the connector's turn alone
        Call("sample_tokens", 15.0, 15.1, 0),
        Call("execute_model", 16.0, 19.0, 50),
        Call("sample_tokens", 19.0, 20.0, 0),
        Call("execute_model", 21.0, 22.0, 0),
    ]
    found = shares(record, 2)
    assert (found.seconds, found.steps, found.tokens) == (10.0, 2, 150)
    assert found.idle == pytest.approx(0.25)
    assert found.longest_s == pytest.approx([2.0, 0.5, 0.0])


def test_a_worker_that_computed_nothing_has_no_share() -> None:
    with pytest.raises(ValueError, match="computed nothing"):
        shares([Call("execute_model", 0.0, 1.0, 0)], 2)


def test_checks_are_shares_of_all_cores_seconds() -> None:
    record = [
        Call("execute_model", 0.0, 10.0, 1),
        Call("values", 3.0, 4.0, 0, 0.5),
        Call("values", 3.5, 4.5, 0, 0.3),
        Call("sums", 11.0, 12.0, 0, 0.2),
    ]
    found = shares(record, 2)
    assert found.checks == pytest.approx({"values": 0.04, "sums": 0.01})
    assert found.idle == 0.0
    assert re.search(r"all checks, of the cores' seconds +\| +5\.000%", report({"a job": found}))
