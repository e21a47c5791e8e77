"""`python -m benchmarks.loop.turns`: whose answers a drafter should be trained on, in conversations.

The same conversations make three datasets: with the answers of their source, with the last turn answered by
the target, with every turn answered by the target. Each makes drafters, which vLLM serves in conversations
that none of them saw, where the target answers every turn. Stages are kept with those of `benchmarks.loop`.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, command, command_line
from benchmarks.loop.datasets import exported, extracted, make_target
from benchmarks.loop.drafters import acceptance
from benchmarks.loop.recipe import EAGLE3, LoopRecipe, talks
from benchmarks.loop.stage import Cache, LoopFailed, say
from benchmarks.loop.table import acceptance_table
from benchmarks.machine import machine_facts
from benchmarks.trainers import has_speculators

RECIPE = LoopRecipe(questions=110, held_out=30, batch_tokens=1024, epochs=10, steps=180, seeds=(0, 1, 2))
"""Its questions are conversations. Rows of the target's own answers are shorter: as many epochs were fewer
steps for them."""
MOST_TURNS = 3
WAYS: dict[str, str | None] = {"source": None, "last_turn": "last", "all_turns": "all"}
"""`generate.turns` of each dataset."""

Talk = list[list[dict[str, Any]]]


def main() -> int:
    """Run the loop, print the table, keep the figures; return 1 if the target's own answers are no better."""
    parser = command_line("benchmarks.loop.turns", __doc__)
    add, kept = parser.add_argument, RESULTS / "turns-loop.json"
    add("--dir", type=Path, default=Path(".cache/loop"), help="where every stage is kept")
    add("--save", type=Path, nargs="?", const=kept, metavar="FILE", help=f"keep the figures ({kept.name})")
    options = parser.parse_args()
    if not has_speculators():
        say("the speculators trainer is not installed: run 'make .cache/trainers/installed'")
        return 2
    cache, every = Cache(options.dir.resolve()), talks(RECIPE.questions + RECIPE.held_out, MOST_TURNS)
    try:
        target = make_target(cache, RECIPE)
        data = {way: dataset(cache, target, way, every[RECIPE.held_out :]) for way in WAYS}
        asked = [[unanswered(turn) for turn in talk] for talk in every[: RECIPE.held_out]]
        outcomes = acceptance(cache, RECIPE, EAGLE3, target, data, asked)
    except LoopFailed as error:
        say(str(error))
        return 1
    say(f"\n{acceptance_table(EAGLE3.title, outcomes)}")
    if options.save:
        result = {
            "command": command("benchmarks.loop.turns", options),
            "recipe": {name: value for name, value in dataclasses.asdict(RECIPE).items() if name != "target"},
            "machine": machine_facts(options.dir),
            "acceptance": {name: outcome.as_json() for name, outcome in outcomes.items()},
        }
        options.save.write_text(json.dumps(result, indent=1) + "\n")
    return int(outcomes["all_turns"].mean_length <= outcomes["source"].mean_length)


def dataset(cache: Cache, target: Path, way: str, given: Sequence[Talk]) -> Path:
    """Return the folder that the trainer reads of one way to answer. Raises LoopFailed."""
    samples = [
        {"id": str(number), "messages": [message for turn in talk for message in turn]}
        for number, talk in enumerate(given)
    ]
    turns = WAYS[way]
    answer = {"turns": turns, "max_tokens": RECIPE.answer_tokens} if turns else None
    made = extracted(cache, f"turns_{way}", target, samples, generate=answer)
    return exported(cache, target, made, RECIPE.draft_vocab)


def unanswered(turn: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a turn without the source's answer."""
    return [message for message in turn if message["role"] != "assistant"]


if __name__ == "__main__":
    sys.exit(main())
