"""The arithmetic of the start-up's figures; no engine, and no claim about a time."""

from benchmarks.startup import BARE, QUARRY, table


def test_a_row_is_compared_with_vllm_alone_in_its_own_round() -> None:
    lines = table({QUARRY: [3.0, 8.0], BARE: [2.0, 8.0]}).splitlines()
    assert "5.50 (3.00..8.00)" in lines[2]
    assert "1.25 (1.00..1.50)" in lines[2]
