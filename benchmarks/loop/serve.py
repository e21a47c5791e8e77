"""Target and drafter in vLLM's CPU build: how many of the drafted tokens the target accepts.

`python -m benchmarks.loop.serve ASKED.json` runs in a process of its own, which vLLM's counters then are of.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.loop.recipe import LoopRecipe, Method, question
from benchmarks.loop.stage import LOG, VLLM_ENVIRONMENT, Cache, python, run

COUNTS = "counts.json"

Asked = str | list[list[dict[str, Any]]]
"""One question, or what is asked in each turn of a conversation: the target answers turn by turn."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """VLLM's own counts over the held-out questions. `per_position[i]`: drafts whose token i was accepted."""

    drafts: int
    drafted_tokens: int
    accepted_tokens: int
    per_position: tuple[int, ...]
    answer_tokens: int

    @property
    def mean_length(self) -> float:
        """Tokens that one step of the target yields: the accepted ones and its own."""
        return 1 + self.accepted_tokens / self.drafts


def served(
    cache: Cache, recipe: LoopRecipe, method: Method, target: Path, drafter: Path, questions: Sequence[Asked]
) -> Acceptance:
    """Serve `target` with `drafter`, ask it `questions` greedily, and return what was accepted.

    Raises LoopFailed.
    """
    asked = {
        "target": str(target),
        "drafter": str(drafter),
        "drafted": recipe.drafted,
        "answer_tokens": recipe.answer_tokens,
        "questions": questions,
        **method.serving,
    }
    decides = asked | {"target": target.name, "drafter": drafter.parent.name}

    def make(folder: Path) -> None:
        (folder / "asked.json").write_text(json.dumps(asked))
        run(python("benchmarks.loop.serve", folder / "asked.json"), folder / LOG, VLLM_ENVIRONMENT)

    folder = cache.stage(f"served-{drafter.parent.name.removeprefix('trained-')}", decides, make)
    counts = json.loads((folder / COUNTS).read_text())
    return Acceptance(**counts | {"per_position": tuple(counts["per_position"])})


def main(asked_file: Path) -> None:
    """Serve and ask; write the counts beside the file that says what is asked."""
    from vllm import LLM, SamplingParams

    asked = json.loads(asked_file.read_text())
    llm = LLM(
        asked["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=16,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": asked["drafter"],
            "num_speculative_tokens": asked["drafted"],
            "parallel_drafting": asked.get("parallel_drafting", False),
        },
    )
    turns = [[question(one)] if isinstance(one, str) else one for one in asked["questions"]]
    talks: list[list[Any]] = [[] for _ in turns]
    answered = 0
    for turn in range(max(map(len, turns))):
        going = [number for number, one in enumerate(turns) if len(one) > turn]
        for number in going:
            talks[number] += turns[number][turn]
        sampling = SamplingParams(temperature=0, max_tokens=asked["answer_tokens"])
        answers = llm.chat([talks[number] for number in going], sampling, use_tqdm=False)
        for number, answer in zip(going, answers, strict=True):
            talks[number].append({"role": "assistant", "content": answer.outputs[0].text})
            answered += len(answer.outputs[0].token_ids)
    counts = counted(llm.get_metrics()) | {"answer_tokens": answered}
    asked_file.with_name(COUNTS).write_text(json.dumps(counts))


def counted(metrics: list[Any]) -> dict[str, Any]:
    """Return the fields of Acceptance among vLLM's metrics."""
    by_name = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in metrics}
    return {
        "drafts": int(by_name["drafts"].value),
        "drafted_tokens": int(by_name["draft_tokens"].value),
        "accepted_tokens": int(by_name["accepted_tokens"].value),
        "per_position": [int(value) for value in by_name["accepted_tokens_per_pos"].values],
    }


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main(Path(sys.argv[1]))
