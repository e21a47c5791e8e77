"""Conversations that a scripted target answers turn by turn, in whole jobs."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from schemas.job import JobState
from service.proof.verify import verify_dataset
from service.store import JobRow, commits
from tests.support.jobs import Shop, request
from tests.support.talking_engine import Said, TalkingEngine
from tests.support.tiny_model import random_target

END = "<|im_end|>"
CONVERSATION = {
    "id": "talk",
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "what the source says"},
        {"role": "user", "content": "second"},
        {"role": "assistant", "content": "what the source says then"},
        {"role": "user", "content": "third"},
    ],
}


def turns_of(prompt: str) -> int:
    return prompt.count("user\n")


def by_turn(*answers: Said) -> Callable[[str], Said]:
    return lambda prompt: answers[turns_of(prompt) - 1]


THREE = by_turn((" one ", "end"), ("two</think>", "end"), ("three", "end"))


class Talked:
    """A shop whose target answers by a script."""

    def __init__(self, folder: Path, template: str) -> None:
        self.target = random_target(folder / "models" / "target", max_position=512, chat_template=template)
        self.tokenizer = AutoTokenizer.from_pretrained(self.target)
        engine = "tests.support.talking_engine:TalkingEngine"
        self.shop = Shop.open(folder, self.target, engine=engine)

    def run(self, script: Callable[[str], Said], *samples: dict[str, Any], **generate: Any) -> JobRow:
        TalkingEngine.script = staticmethod(script)  # type: ignore[assignment]
        changes = generate.pop("changes", {})
        asked = {"turns": "all", "max_tokens": 24} | generate
        job = self.shop.run(request(self.target, samples or [CONVERSATION], generate=asked, **changes))
        if job.state is JobState.COMPLETED and job.progress.samples_written:
            report = verify_dataset(self.shop.settings.dataset_dir(job.id))
            assert report.ok, str(report)
        return job

    def rows(self, job: JobRow) -> list[tuple[str, str, list[str]]]:
        """Return each row's source id, its text, and the texts of its supervised runs."""
        rows = []
        for row in self.shop.rows(job.id):
            runs, last = [], 0
            for token, flag in zip(row["input_ids"], row["loss_mask"], strict=True):
                if flag and not last:
                    runs.append([])
                if flag:
                    runs[-1].append(token)
                last = flag
            texts = [self.tokenizer.decode(run) for run in runs]
            assert row["prompt_tokens"] == row["loss_mask"].index(1)
            rows.append((row["source_id"], self.tokenizer.decode(row["input_ids"]), texts))
        return rows

    def rejects(self, job: JobRow) -> list[tuple[str | None, int, str]]:
        found = self.shop.store.read(commits.rejects, job.id)
        return [(reject.source_id, reject.turn, reject.reason) for reject in found]

    def every_reject(self, job: JobRow) -> list[Any]:
        return list(self.shop.store.read(commits.rejects, job.id))

    def counts(self, job: JobRow) -> dict[str, int]:
        made = self.shop.store.read(commits.unit_commits, job.id)
        return dict(sum((Counter(unit.checks.answers) for unit in made), Counter()))
