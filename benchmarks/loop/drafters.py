"""The drafters of every dataset, trained and served side by side."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.loop.method import Method
from benchmarks.loop.recipe import LoopRecipe
from benchmarks.loop.serve import Acceptance, served
from benchmarks.loop.stage import Cache
from benchmarks.loop.table import OURS, UNTRAINED, Outcome
from benchmarks.loop.train import DRAFTER, steps_of, train, untrained

SIDE_BY_SIDE = 2
"""Drafters trained and served at a time, each on one core."""


def acceptance(
    cache: Cache,
    recipe: LoopRecipe,
    method: Method,
    target: Path,
    data: Mapping[str, Path],
    held_out: list[str],
) -> dict[str, Outcome]:
    """Train and serve the drafters of every dataset, and one that was not trained. Raises LoopFailed."""
    raw = untrained(cache, recipe, method, target, data[OURS], recipe.seeds[0])
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        first = pool.submit(served, cache, recipe, method, target, raw / DRAFTER, held_out)
        told = {
            (seed, name): pool.submit(drafter, cache, recipe, method, target, folder, seed, held_out)
            for seed in recipe.seeds
            for name, folder in data.items()
        }
        outcomes = {
            name: outcome({seed: told[seed, name].result() for seed in recipe.seeds}) for name in data
        }
        outcomes[UNTRAINED] = Outcome((0,), {recipe.seeds[0]: first.result()})
    return outcomes


def drafter(
    cache: Cache,
    recipe: LoopRecipe,
    method: Method,
    target: Path,
    data: Path,
    seed: int,
    held_out: list[str],
) -> tuple[int, Acceptance]:
    """Train one drafter and serve it; return its steps and its acceptance. Raises LoopFailed."""
    trained = train(cache, recipe, method, target, data, seed)
    return steps_of(trained), served(cache, recipe, method, target, trained / DRAFTER, held_out)


def outcome(by_seed: Mapping[int, tuple[int, Acceptance]]) -> Outcome:
    """Return what all drafters of a dataset came to."""
    steps = tuple(steps for steps, _ in by_seed.values())
    return Outcome(steps, {seed: acceptance for seed, (_, acceptance) in by_seed.items()})
