"""Estimates what a job would need: its rows go through the same planner, but nothing is stored."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from schemas.dataset.columns import state_bytes, stored_token_bytes
from schemas.job import Estimate, RowATurn
from schemas.names import MAX_COMMIT_FILES
from schemas.request import ExtractRequest
from service.artifacts.folder_limit import check_folder
from service.plan.child.process import tokenizing
from service.plan.child.task import Purpose, Task
from service.plan.content_hashes import SeenHashes
from service.plan.model_folder import ModelFolder, weight_roots_of
from service.plan.planner import unit_bounds
from service.plan.sources import open_source
from service.plan.target import fetch_target, target_of
from service.plan.units import PlannedSample, plan_units
from service.settings import Settings


def estimate_request(
    request: ExtractRequest,
    settings: Settings,
    watch: Callable[[], None] = lambda: None,
    document: str | None = None,
) -> Estimate:
    """Read and tokenize the whole source and sum up; time grows with the source, memory with one unit.

    `tokens` and `bytes` are upper bounds in a `generate` job: every answer is counted at its longest. `bytes`
    are the states before compression, `stored_bytes` after it, if that is known. `document` is the whole
    request as JSON, for a `request` that has only the first of its inline samples.

    Raises what planning the job would raise, and what `watch`, which is called regularly, raises.
    """
    located = fetch_target(request, settings)
    source = open_source(request.source, settings, labels=request.labels, document=document)
    task = Task(Purpose.ESTIMATE, request, located, settings.model_roots, weight_roots_of(settings), source)
    samples = rejected = tokens = shards = units = 0
    in_turns = _RowATurn()
    with tokenizing(task, settings, watch) as child:
        target = target_of(request, located or ModelFolder(Path(request.model)), child.opening().config)
        bounds = unit_bounds(request, target, settings)
        for draft in plan_units(child.rows(), bounds, SeenHashes(settings.work_root).add):
            rejected += len(draft.rejects)
            samples += len(draft.samples)
            tokens += sum(sample.most_tokens for sample in draft.samples)
            in_turns.add(draft.samples)
            units += bool(draft.samples)
            shards += min(settings.tensor_parallel_size, len(draft.samples))  # one of each rank
            if request.hub is not None:
                check_folder(shards)
    shape = (len(target.layer_ids), target.hidden_size, target.dtype)
    captured, stored = state_bytes(1, *shape), stored_token_bytes(*shape, request.storage.compression)
    # Each unit has an index; the job has a final norm, counts, manifest and card.
    commits = math.ceil((shards + units + 4) / MAX_COMMIT_FILES)
    return Estimate(
        samples=samples,
        rejected=rejected,
        tokens=tokens,
        bytes=tokens * captured,
        shards=shards,
        commits=commits if request.hub is not None else 0,
        bytes_per_token=captured,
        layer_ids=target.layer_ids,
        stored_bytes=None if stored is None else tokens * stored,
        row_a_turn=in_turns.summed() if request.generate and request.generate.turns == "all" else None,
    )


class _RowATurn:
    """Sums over conversations whose turns are rows; rows of one conversation are consecutive."""

    def __init__(self) -> None:
        self._why: Counter[str] = Counter()
        self._rows = self._tokens = self._once = self._last = 0

    def add(self, samples: Iterable[PlannedSample]) -> None:
        for sample in samples:
            dialogue = sample.dialogue
            if dialogue is None or not dialogue.turn:
                continue
            if dialogue.turn == 1:
                self._why[dialogue.why] += 1
                self._last = 0
            self._rows += 1
            self._tokens += sample.most_tokens
            self._once += sample.most_tokens - self._last
            self._last = sample.most_tokens

    def summed(self) -> RowATurn:
        counts = {"conversations": self._why.total(), "rows": self._rows}
        return RowATurn(**counts, tokens=self._tokens, tokens_once=self._once, why=dict(self._why))
