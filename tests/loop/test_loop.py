"""The whole loop in its short form: vLLM, Quarry, the speculators trainer, and vLLM with what it trained."""

import json
import subprocess
import sys

import pytest

from benchmarks.loop.stage import ROOT
from benchmarks.loop.table import FEWER, OURS, PEER, ROWS, UNTRAINED, WRONG

TIMEOUT_S = 2400


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_drafters_of_our_states_are_accepted_as_the_peers_are_and_those_of_wrong_states_less(tmp_path):
    """1. The command runs every stage in its short form and judges the outcome itself.

    2. Run again, it reads what it kept and says the same. 3. Our acceptance is the peer's, and every wrong
    dataset's is below, by EAGLE-3 and by P-EAGLE.
    """
    command = [sys.executable, "-m", "benchmarks.loop", "--short", "--dir", tmp_path / "cache", "--save"]
    kept = []
    for name in ("first.json", "second.json"):
        done = subprocess.run(
            [*command, tmp_path / name],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        kept.append(json.loads((tmp_path / name).read_text()))
    first, second = kept
    assert first["acceptance"] == second["acceptance"]
    assert first["acceptance_peagle"] == second["acceptance_peagle"]
    assert first["not_as_it_should_be"] == []
    lengths = {name: found["mean_accepted_length"] for name, found in first["acceptance"].items()}
    assert lengths.keys() == ROWS.keys()
    assert lengths[OURS] == pytest.approx(lengths[PEER], abs=0.1)
    assert lengths[OURS] > 1 + 2 * (lengths[UNTRAINED] - 1)
    assert all(lengths[name] < lengths[OURS] for name in WRONG)
    steps = {name: found["steps"] for name, found in first["acceptance"].items() if name != UNTRAINED}
    assert len(set(map(tuple, steps.values()))) == 1
    parallel = first["acceptance_peagle"]
    lengths = {name: found["mean_accepted_length"] for name, found in parallel.items()}
    assert lengths.keys() == {*FEWER, UNTRAINED}
    assert lengths[OURS] == pytest.approx(lengths[PEER], abs=0.1)
    assert lengths["layer_below"] < lengths[OURS]
    assert lengths[OURS] > 1 + 2 * (lengths[UNTRAINED] - 1)
    # Tokens after the first are drafted too, and by other drafters than EAGLE-3's.
    assert all(parallel[OURS]["acceptance_by_position"])
    assert parallel[OURS]["seeds"] != first["acceptance"][OURS]["seeds"]
