"""What storing states costs and loses, form by form: `python -m benchmarks.storage --save`.

What is lost is measured on a trained small target's states over real text; what it costs on states as wide as
an 8B model's, one thread, the forms in turns and in another order each round.

Legend: T tokens, L captured layers, H hidden size, V vocabulary.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine_facts
from benchmarks.storage_forms import Form, forms
from benchmarks.storage_states import CHANNELS, EVERY, LAYERS, MASSIVE, Captured, captured
from benchmarks.summary import spread
from benchmarks.table import markdown
from benchmarks.trainers import has_speculators
from service.proof.head import Head
from tests.support.plans import random_ids

RESULTS = Path(__file__).parent / "results" / "storage.json"
SCRATCH = Path(".cache")
"""On the disk that the repository is on."""
WIDE_LAYERS, WIDE_TOKENS, WIDE_H = (2, 16, 29, 32), 512, 4096
FIGURES = ("write_cpu_s_per_gb", "write_s_per_gb", "read_cpu_s_per_gb", "size")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, keep the figures."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.storage", description=__doc__)
    made.add_argument("--samples", type=int, default=48, help="conversations whose states are compared")
    made.add_argument("--rows", type=int, default=24, help="wide rows a file")
    made.add_argument("--rounds", type=int, default=5, help="times that every form is timed")
    made.add_argument("--save", type=Path, nargs="?", const=RESULTS, help="keep the figures")
    told = made.parse_args(arguments)
    if not has_speculators():
        made.error("speculators is not there to be compared with: `make test` or `make bench` installs it")
    SCRATCH.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch:
        machine = machine_facts(Path(scratch))
        kept: dict[str, Any] = {"machine": machine, "samples": told.samples, "rows": told.rows}
        kept["states"] = {"massive": MASSIVE, "channels": CHANNELS, "every": EVERY}
        kept["lost"] = {
            name: lost(captured(told.samples, massive=name == "massive"), Path(scratch) / name)
            for name in ("text", "massive")
        }
        kept["costs"] = costs(Path(scratch) / "wide", told.rows, told.rounds)
    for name, by_form in kept["lost"].items():
        sys.stdout.write(f"\n{name}\n{lost_table(by_form)}\n")
    sys.stdout.write(f"\n{costs_table(kept['costs'])}\n")
    if told.save:
        told.save.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


def lost(rows: Captured, folder: Path) -> dict[str, dict[str, float]]:
    """Return by form how far the states that are read again are from those that were captured."""
    head = Head.load(rows.target, "bfloat16")
    due_NV = torch.cat([head.logprobs(states_LTH[-1]) for states_LTH in rows.states])
    found = {}
    for name, form in forms(LAYERS).items():
        place = folder / name
        place.mkdir(parents=True)
        num_bytes = form.write(place, rows.ids, rows.states)
        again = [form.read(place, row, len(ids)) for row, ids in enumerate(rows.ids)]
        size = num_bytes / sum(states_LTH.nbytes for states_LTH in rows.states)
        got_NV = torch.cat([head.logprobs(states_LTH[-1]) for states_LTH in again])
        found[name] = {"size": size} | distance(rows.states, again) | opinion(due_NV, got_NV)
    return found


def distance(captured_LTH: Sequence[torch.Tensor], stored_LTH: Sequence[torch.Tensor]) -> dict[str, float]:
    """Return relative error and cosine of a token's state in a layer: the middle and the worst."""
    due = torch.cat([one.flatten(0, 1) for one in captured_LTH]).double()
    got = torch.cat([one.flatten(0, 1) for one in stored_LTH]).double()
    errors = (got - due).norm(dim=1) / due.norm(dim=1)
    cosines = torch.nn.functional.cosine_similarity(got, due, dim=1)
    # Values apart from the token's largest: what massive activations leave of the rest.
    rest = (due.abs() < due.abs().amax(dim=1, keepdim=True) / 64).to(due.dtype)
    small = ((got - due) * rest).norm(dim=1) / (due * rest).norm(dim=1).clamp(min=1e-30)
    return {
        "error_median": float(errors.median()),
        "error_p99.9": float(errors.quantile(0.999)),
        "error_largest": float(errors.max()),
        "rest_error_median": float(small[rest.any(dim=1)].median()) if bool(rest.any()) else 0.0,
        "rest_error_largest": float(small.max()),
        "cosine_median": float(cosines.median()),
        "cosine_least": float(cosines.min()),
    }


def opinion(due_NV: torch.Tensor, got_NV: torch.Tensor) -> dict[str, float]:
    """Return how far the next token's log-probabilities [N, V] moved."""
    kl_N = (due_NV.exp() * (due_NV - got_NV)).sum(dim=1)
    return {
        "kl_mean": float(kl_N.mean()),
        "kl_largest": float(kl_N.max()),
        "argmax_agree": float((due_NV.argmax(dim=1) == got_NV.argmax(dim=1)).double().mean()),
    }


def costs(folder: Path, num_rows: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Return by form the seconds of every round for a GB of captured states, and the size."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    ids = random_ids([WIDE_TOKENS] * num_rows)
    states = []
    for _ in range(num_rows):
        row_LTH = torch.randn((len(WIDE_LAYERS), WIDE_TOKENS, WIDE_H), generator=draw)
        row_LTH[:, ::EVERY, CHANNELS[0]] = MASSIVE
        states.append(row_LTH.bfloat16())
    gigabytes = sum(row_LTH.nbytes for row_LTH in states) / 1e9
    all_forms = forms(WIDE_LAYERS)
    turns: dict[str, dict[str, list[float]]] = {name: {key: [] for key in FIGURES} for name in all_forms}
    shuffled = random.Random(0)
    for turn in range(rounds):
        for name in shuffled.sample(list(all_forms), len(all_forms)):
            one = timed(all_forms[name], folder / f"{turn}-{name}", ids, states)
            for key, figure in one.items():
                turns[name][key].append(figure / gigabytes)
    return {
        name: {key: {"median": spread(values).median, "turns": values} for key, values in figures.items()}
        for name, figures in turns.items()
    }


def timed(
    form: Form, folder: Path, ids: Sequence[list[int]], states: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Write and read once; delete the files."""
    folder.mkdir(parents=True)
    wall, cpu = time.perf_counter(), time.process_time()
    num_bytes = form.write(folder, ids, states)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    begin = time.process_time()
    for row, one in enumerate(ids):
        form.read(folder, row, len(one))
    read = time.process_time() - begin
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    return dict(zip(FIGURES, (cpu, wall, read, num_bytes / 1e9), strict=True))


def lost_table(by_form: dict[str, dict[str, float]]) -> str:
    """Return the table of what is lost."""
    names = list(by_form["none"])
    rows = [[form, *(f"{figures[name]:.3g}" for name in names)] for form, figures in by_form.items()]
    return markdown(["form", *(name.replace("_", " ") for name in names)], rows)


def costs_table(by_form: dict[str, dict[str, Any]]) -> str:
    """Return the table of what it costs."""
    rows = [
        [form, *(f"{figures[key]['median']:.2f}" for key in FIGURES)] for form, figures in by_form.items()
    ]
    return markdown(["form", *(key.replace("_", " ") for key in FIGURES)], rows)


if __name__ == "__main__":
    sys.exit(main())
