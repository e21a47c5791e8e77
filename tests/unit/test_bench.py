"""The benchmark's arithmetic, tables and arguments; no engine, and no claim about a time."""

from pathlib import Path

import pytest

from benchmarks.options import NUM_UNITS, PARTS, Options, parse
from benchmarks.report import (
    ENGINE_ROWS,
    WRITER_ROWS,
    checks_cost,
    checks_line,
    engine_figures,
    engine_table,
    writer_figures,
    writer_table,
)
from benchmarks.summary import Spread, paired, shuffled_rounds, spread
from benchmarks.table import markdown, ratio
from benchmarks.turns import EngineTurn, WriterTurn
from benchmarks.workload import TARGETS, Workload


def engine_turn(seconds: float, cpu_s: float = 1.0, **counts: int) -> EngineTurn:
    return EngineTurn(seconds, cpu_s, **({"peak_rss_bytes": 0, "files": 0, "bytes": 0} | counts))


def test_a_spread_is_the_median_and_both_ends() -> None:
    assert spread([3.0, 1.0, 2.0, 10.0]) == Spread(median=2.5, low=1.0, high=10.0)


def test_no_rounds_have_no_spread() -> None:
    with pytest.raises(ValueError, match="no rounds"):
        spread([])


def test_ratios_are_taken_within_a_round_so_that_a_slow_round_cancels_out() -> None:
    assert paired([50.0, 5.0, 100.0], [100.0, 10.0, 200.0]) == Spread(0.5, 0.5, 0.5)


def test_rows_of_unequal_rounds_are_not_compared() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired([1.0, 2.0], [1.0])


def test_every_round_runs_every_row_once_in_an_order_that_the_seed_repeats() -> None:
    rows = ["a", "b", "c", "d"]
    rounds = shuffled_rounds(rows, 20, seed=3)
    assert all(sorted(order) == rows for order in rounds)
    assert len({tuple(order) for order in rounds}) > 1
    assert rounds == shuffled_rounds(rows, 20, seed=3)


def test_a_table_is_markdown_with_figures_flush_right() -> None:
    assert markdown(["row", "GB/s"], [["write", "1.25"], ["ours", "10.00"]]).splitlines() == [
        "| row   |  GB/s |",
        "| ----- | ----: |",
        "| write |  1.25 |",
        "| ours  | 10.00 |",
    ]


def test_a_short_row_is_no_table() -> None:
    with pytest.raises(ValueError, match="shorter"):
        markdown(["row", "GB/s"], [["write"]])


def test_a_ratio_shows_its_range() -> None:
    assert ratio(Spread(0.97, 0.951, 1.014)) == "0.97 (0.95..1.01)"


def test_engine_figures_are_rates_ratios_to_plain_and_the_most_of_what_was_used() -> None:
    turns = {
        "plain": [engine_turn(2.0, 4.0), engine_turn(1.0, 2.0)],
        "quarry": [engine_turn(4.0, 5.0, bytes=10, files=2, peak_rss_bytes=7), engine_turn(1.25, 2.5)],
    }
    figures = engine_figures(turns, num_tokens=1000)
    assert figures["plain"].ratio == Spread(1.0, 1.0, 1.0)
    quarry = figures["quarry"]
    assert quarry.tokens_per_s == Spread(median=525.0, low=250.0, high=800.0)
    assert quarry.ratio == Spread(0.65, 0.5, 0.8)
    assert quarry.best_ratio == 0.8
    assert quarry.cpu_s_per_mtoken == Spread(median=3750.0, low=2500.0, high=5000.0)
    assert quarry.cpu_ratio == Spread(1.25, 1.25, 1.25)
    assert (quarry.bytes, quarry.files, quarry.peak_rss_bytes) == (10, 2, 7)


def test_what_the_checks_cost_is_taken_within_a_round() -> None:
    turns = {
        "quarry": [engine_turn(2.04, 1.02), engine_turn(4.12, 2.02)],
        "unchecked": [engine_turn(2.0, 1.0), engine_turn(4.0, 2.0)],
    }
    cost = checks_cost(turns)
    assert cost.seconds_ratio == Spread(pytest.approx(1.025), pytest.approx(1.02), pytest.approx(1.03))
    assert cost.cpu_ratio == Spread(pytest.approx(1.015), pytest.approx(1.01), pytest.approx(1.02))
    assert checks_line(cost).startswith("The checks: 1.02 (1.02..1.03) of the time without them, 1.0")


def test_a_writer_row_is_compared_with_the_plain_way_to_the_same_promise() -> None:
    seconds = {"write-fsync": 4.0, "quarry-sealed": 5.0, "write": 1.0, "quarry-rows": 2.0}
    turns = {kind: [WriterTurn(taken, 0.5, bytes=2 * 10**9)] for kind, taken in seconds.items()}
    figures = writer_figures(turns)
    assert {kind: figures[kind].gb_per_s.median for kind in seconds} == {
        "write-fsync": 0.5,
        "quarry-sealed": 0.4,
        "write": 2.0,
        "quarry-rows": 1.0,
    }
    assert figures["quarry-sealed"].ratio.median == 0.8
    assert figures["quarry-rows"].ratio.median == 0.5
    assert figures["write"].cpu_s_per_gb.median == 0.25


def test_the_tables_name_every_row_the_command_and_what_is_not_durable() -> None:
    turns = {kind: [engine_turn(1.0)] for kind in ENGINE_ROWS}
    engines = engine_table(engine_figures(turns, 10), "work", "one")
    files = {kind: [WriterTurn(1.0, 1.0, 10**9)] for kind in WRITER_ROWS}
    writers = writer_table(writer_figures(files), "work", "two")
    assert all(label in engines for label in ENGINE_ROWS.values())
    assert all(label in writers for label in WRITER_ROWS.values())
    assert "$ one" in engines and "$ two" in writers
    assert "not durable" in engines


@pytest.mark.parametrize("name", TARGETS)
def test_the_units_of_a_round_are_its_prompts_in_order_and_fit_the_target(name: str) -> None:
    target = TARGETS[name]
    work = Workload(target, num_prompts=10, num_units=NUM_UNITS, seed=1)
    assert [prompt for unit in work.units() for prompt in unit] == work.prompts()
    assert {len(unit) for unit in work.units()} == {2, 3}
    for prompt in work.prompts():
        assert target.shortest_prompt <= len(prompt) <= target.longest_prompt
        assert set(prompt) <= set(range(target.vocab_size))


def test_the_commands_measure_the_same_again(tmp_path: Path) -> None:
    for said in (["--quick"], ["--target", "drain", "--only", "writer"], ["--rounds", "3", "--seed", "4"]):
        options = parse([*said, "--dir", str(tmp_path), "--save", "kept"])
        again = parse(options.command().split()[3:])
        assert measured(again) == measured(options)
        for part in PARTS:
            assert parse(options.command(part).split()[3:]).parts == (part,)
        assert str(tmp_path) not in options.command()


def measured(options: Options) -> tuple[object, ...]:
    return (options.target, options.rounds, options.prompts, options.writer_rows, options.parts, options.seed)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (["--rounds", "0"], "--rounds"),
        (["--prompts", "3"], "--prompts"),
        (["--target", "huge"], "--target"),
        (["--save", "../elsewhere"], "--save"),
        (["--save", "a/b"], "--save"),
        (["--only", "network"], "--only"),
    ],
)
def test_a_bad_argument_is_refused_by_name(
    said: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(said)
    assert named in capsys.readouterr().err
