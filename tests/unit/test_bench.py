"""The benchmark's arithmetic, tables and arguments; no engine, and no claim about a time."""

from pathlib import Path

import pytest

from benchmarks.bench import parse, work_of
from benchmarks.catalog import PLAIN, ROWS
from benchmarks.harness import Spread, command, paired, run_rounds, shuffled_rounds
from benchmarks.report import (
    WRITER_BASES,
    EngineTurn,
    RateTurn,
    against_peers,
    engine_figures,
    engine_table,
    rate_figures,
)
from benchmarks.workload import KINDS, TARGETS, workload


def engine_turn(seconds: float, cpu_s: float = 1.0, **counts: int) -> EngineTurn:
    return EngineTurn(seconds, seconds, cpu_s, **({"peak_rss_bytes": 0, "files": 0, "bytes": 0} | counts))


def test_ratios_are_taken_within_a_round_so_that_a_slow_round_cancels_out() -> None:
    assert paired([50.0, 5.0, 100.0], [100.0, 10.0, 200.0]) == Spread(0.5, 0.5, 0.5)


def test_every_round_runs_every_row_once_in_an_order_that_the_seed_repeats() -> None:
    rows = ["a", "b", "c", "d"]
    rounds = shuffled_rounds(rows, 20, seed=3)
    assert all(sorted(order) == rows for order in rounds)
    assert len({tuple(order) for order in rounds}) > 1
    assert rounds == shuffled_rounds(rows, 20, seed=3)


def test_a_row_is_warmed_up_by_a_round_that_does_not_count() -> None:
    ran: list[tuple[str, int]] = []

    def run(row: str, number: int) -> int:
        ran.append((row, number))
        return number

    assert run_rounds(["a", "b"], [["b", "a"], ["a", "b"]], run) == {"a": [1, 2], "b": [1, 2]}
    assert ran == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]


def test_engine_figures_are_rates_ratios_to_plain_and_the_most_of_what_was_used() -> None:
    turns = {
        "plain": [engine_turn(2.0, 4.0), engine_turn(1.0, 2.0)],
        "quarry": [engine_turn(4.0, 5.0, bytes=10, files=2, peak_rss_bytes=7), engine_turn(1.25, 2.5)],
    }
    figures = engine_figures(turns, num_tokens=1000, state_bytes=10**10)
    assert figures["plain"].ratio == Spread(1.0, 1.0, 1.0)
    quarry = figures["quarry"]
    assert quarry.tokens_per_s == Spread(median=525.0, low=250.0, high=800.0)
    assert quarry.ratio == Spread(0.65, 0.5, 0.8)
    assert quarry.best_ratio == 0.8
    assert quarry.cpu_s_per_gb == Spread(median=0.375, low=0.25, high=0.5)
    assert quarry.cpu_ratio == Spread(1.25, 1.25, 1.25)
    assert (quarry.bytes, quarry.files, quarry.peak_rss_bytes) == (10, 2, 7)


def test_quarry_is_compared_with_every_peer_and_nothing_else() -> None:
    turns = {kind: [engine_turn(2.0), engine_turn(4.0)] for kind in ROWS} | {
        "quarry": [engine_turn(1.0), engine_turn(1.0)]
    }
    ratios = against_peers(turns)
    assert set(ratios) == {"example", "example-synced", "example-memory", "example-consumed"}
    assert ratios["example"] == Spread(3.0, 2.0, 4.0)
    assert against_peers({"plain": [engine_turn(1.0)], "example": [engine_turn(1.0)]}) == {}
    table = engine_table(engine_figures(turns, num_tokens=1000, state_bytes=10**9), ratios)
    assert next(line for line in table.splitlines() if "consume" in line).count("3.00 (2.00..4.00)") == 1


def test_a_writer_row_is_compared_with_the_plain_way_to_the_same_promise() -> None:
    seconds = {"write-fsync": 4.0, "quarry": 5.0, "write": 1.0}
    seconds |= {"write-fsync-alone": 2.0, "quarry-alone": 4.0}
    turns = {kind: [RateTurn(taken, 0.5, bytes=2 * 10**9)] for kind, taken in seconds.items()}
    figures = rate_figures(turns, {kind: WRITER_BASES.get(kind, kind) for kind in turns})
    assert {kind: figures[kind].gb_per_s.median for kind in seconds} == {
        "write-fsync": 0.5,
        "quarry": 0.4,
        "write-fsync-alone": 1.0,
        "quarry-alone": 0.5,
        "write": 2.0,
    }
    assert figures["quarry"].ratio.median == 0.8
    assert figures["quarry-alone"].ratio.median == 0.5
    assert figures["write"].cpu_s_per_gb.median == 0.25


def test_what_stores_the_states_as_they_are_owes_all_of_their_bytes() -> None:
    owes = {name: kind.least_stored for name, kind in ROWS.items() if kind.least_stored != 1.0}
    assert owes == {PLAIN: 0.0, "capture": 0.0, "quarry-planes": 0.5, "quarry-fp8": 0.5}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS)
def test_the_units_of_a_round_are_its_prompts_in_order_and_fit_the_target(target: str, kind: str) -> None:
    work = workload(TARGETS[target], kind, num_prompts=10, seed=1)
    assert [prompt for unit in work.units("quarry", 3) for prompt in unit] == work.prompts("quarry", 3)
    assert {len(unit) for unit in work.units("quarry", 3)} == {2, 3}
    for prompt in work.prompts("quarry", 3):
        assert KINDS[kind].shortest <= len(prompt) <= KINDS[kind].longest
        assert set(prompt) <= set(range(TARGETS[target].vocab_size))


@pytest.mark.parametrize(("row", "turn"), [("quarry", 2), ("quarry-fp8", 1)])
def test_every_round_of_every_row_has_other_tokens_of_the_same_lengths_so_that_nothing_is_cached(
    row: str, turn: int
) -> None:
    work = workload(TARGETS["drain"], "typical", num_prompts=None, seed=0)
    first, other = work.prompts("quarry", 1), work.prompts(row, turn)
    assert first == work.prompts("quarry", 1)
    assert [len(prompt) for prompt in first] == [len(prompt) for prompt in other] == work.lengths()
    assert not {prompt[:16] for prompt in first} & {prompt[:16] for prompt in other}


def test_prompts_share_their_beginning_within_a_unit_alone() -> None:
    work = workload(TARGETS["drain"], "shared", num_prompts=8, seed=0)
    begins = [{prompt[:384] for prompt in unit} for unit in work.units("quarry", 1)]
    assert [len(of_unit) for of_unit in begins] == [1, 1, 1, 1]
    assert len(set.union(*begins)) == 4
    assert len({prompt[:400] for prompt in work.prompts("quarry", 1)}) == 8


def test_the_last_token_of_an_answer_has_no_state() -> None:
    work = workload(TARGETS["compute"], "generate", num_prompts=2, seed=0)
    assert work.stored_lengths() == [length + 63 for length in work.lengths()]
    assert work.state_bytes == (sum(work.lengths()) + 2 * 63) * 8192


def test_the_commands_measure_the_same_again(tmp_path: Path) -> None:
    for said in (
        ["--eager", "--workload", "long"],
        ["--target", "drain", "--only", "writer"],
        ["--rounds", "3", "--seed", "4", "--rows", "quarry", "example"],
    ):
        options = parse([*said, "--dir", str(tmp_path), "--save", "kept"])
        line = command("benchmarks.bench", options)
        again = parse(line.split()[3:])
        assert vars(again) == vars(options) | {"dir": again.dir, "save": None}
        assert work_of(again) == work_of(options)
        assert str(tmp_path) not in line


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (["--rounds", "0"], "--rounds"),
        (["--prompts", "0"], "--prompts"),
        (["--rows", "quarry", "mine"], "--rows"),
        (["--workload", "odd"], "--workload"),
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
