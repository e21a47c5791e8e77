"""`quarry train speculators --live`: its own command, fed with the rows of a job as they are captured.

Rows come by `QuarryStream.follow`, in one epoch, and are packed as they come. What a checkpoint was trained
on is kept beside it, and acknowledged, so that a trainer that is killed goes on there.

Imports speculators: import it lazily.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from speculators.train import cli
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.dataloader import _setup_dataloader
from speculators.train.distributed import (
    get_dp_rank,
    get_dp_size,
    get_local_rank,
    get_sp_size,
    is_distributed,
)
from speculators.train.trainer import MIN_STEP_PCT, Trainer

from schemas.dataset.seal import sealing
from service.errors import OptionRefused, SourceRefused
from service.export.formats.speculators import row_tensors
from service.export.options import ExportOptions
from service.reader import QuarryStream, ReaderError
from service.reader.row import About, Row
from service.reader.served import ServedJob

STATES_FILE = "quarry_rows.json"
"""Beside a checkpoint: how far each rank has come."""
PATIENCE_S = 600.0

Batch = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Live:
    """A job that is followed: its address, the consumer that acknowledges rows, and what a row must be."""

    server: str
    job_id: str
    consumer: str | None
    about: About
    """Of the rows that validate."""
    options: ExportOptions

    @classmethod
    def at(cls, address: str, consumer: str | None, about: About, options: ExportOptions) -> "Live":
        """Take the job's URL apart. Raises OptionRefused (`live`)."""
        server, found, job_id = address.rstrip("/").rpartition("/jobs/")
        if not found:
            cure = "give the job's URL, such as http://host:8000/jobs/j-0123456789abcdef"
            raise OptionRefused(f"{address} names no job", field="live", cure=cure)
        return cls(server, job_id, consumer, about, options)

    def train_by(self, max_steps: int | None) -> None:
        """Have speculators' command take its rows from the job from now on."""

        def loaders(**options: Any) -> tuple["LiveLoader", Any]:  # noqa: ANN401 - theirs
            return LiveLoader(self, max_steps, **options), validation(**options)

        cli.__dict__.update(create_train_val_loaders=loaders, Trainer=LiveTrainer)


@dataclass(frozen=True, slots=True)
class TrainerRow:
    """Makes of a row what speculators' own dataset makes of it."""

    live: Live

    def check(self, about: About) -> None:
        """Raise ReaderError if the job is of another model, or lacks a layer."""
        if about.weights_sha256 != self.live.about.weights_sha256:
            raise ReaderError(f"the job captures another model than {self.live.about.model} of the dataset")
        if missing := sorted(set(self.live.options.layers or ()) - set(about.layer_ids)):
            raise ReaderError(f"the job captures layers {list(about.layer_ids)}, and not {missing}")

    def __call__(self, row: Row) -> Batch:
        """Return the row's tensors: states [T, A * H] and [T, H], ids, mask, positions and length."""
        options = self.live.options
        tensors = row_tensors(row, options.algorithm, options.layers or ())
        states_TLH, num_tokens = tensors["hidden_states"], row.num_tokens
        return {
            "hidden_states": states_TLH[:, :-1].flatten(1),
            "input_ids": tensors["token_ids"],
            "verifier_last_hidden_states": states_TLH[:, -1],
            "loss_mask": row.loss_mask.long(),
            "lengths": torch.tensor([num_tokens]),
            "position_ids": torch.arange(num_tokens),
        }


class LiveLoader:
    """Packed batches of one rank, until no rank has another one; a rank that has none gets an empty one.

    It has what speculators' trainer asks of a loader: a length, which is an estimate, and a sampler.
    """

    def __init__(
        self,
        live: Live,
        max_steps: int | None,
        *,
        total_seq_len: int,
        hidden_states_dtype: torch.dtype,
        hidden_size: int,
        num_target_layers: int,
        preprocess: Callable[[Batch], Batch] | None,
        **_: object,
    ) -> None:
        """Register the consumer. Raises OptionRefused (`max_steps`, `sp_size`), ReaderError."""
        if get_sp_size() > 1:
            raise OptionRefused("sequences cannot be split live", field="sp_size", cure="leave --sp-size out")
        self._live, self._tokens = live, total_seq_len
        self._collate = CollateFn(
            total_seq_len, hidden_size, num_target_layers, hidden_states_dtype, preprocess
        )
        where: dict[str, Any] = {"rank": get_dp_rank(), "world_size": get_dp_size(), "patience_s": PATIENCE_S}
        self._rows = QuarryStream.follow(live.server, live.job_id, view=TrainerRow(live), **where)
        self._state = self._rows.state_dict()
        self.batch_sampler = _Sampler()
        with refusing_jobs():
            self._length = max_steps or self._estimated()
            if live.consumer is not None:
                self._rows.acknowledge(live.consumer)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        batches = _ahead(self._packed())
        item = next(batches, None)
        while _any_rank(item is not None):
            if item is None:
                yield self._collate([])
            else:
                batch, self._state = item
                yield batch
                item = next(batches, None)

    def go_on(self, states: Sequence[dict[str, int]]) -> None:
        """Begin behind what a checkpoint was trained on."""
        self._state = states[get_dp_rank()]
        self._rows.load_state_dict(self._state)

    def checkpointed(self, folder: Path) -> None:
        """Keep beside a checkpoint how far all ranks are, and let the service remove what they have had."""
        states = [self._state]
        if is_distributed():
            states = [self._state] * get_dp_size()
            dist.all_gather_object(states, self._state)
        if get_dp_rank() == 0:
            with sealing(folder / STATES_FILE) as temporary:
                temporary.write_text(json.dumps(states))
            if self._live.consumer is not None:
                self._rows.acknowledge(self._live.consumer, states)

    def _packed(self) -> Iterator[tuple[Batch, dict[str, int]]]:
        """Yield batches of whole rows, each with the state once it is trained on."""
        waiting: list[Batch] = []
        num_tokens, state = 0, self._state
        for row in self._rows:
            length = int(row["lengths"])
            if waiting and num_tokens + length > self._tokens:
                yield self._collate(waiting), state
                waiting, num_tokens = [], 0
            waiting.append(row)
            num_tokens, state = num_tokens + length, self._rows.state_dict()
        if waiting:  # the last of all rows: nothing of the job is wanted any more
            yield self._collate(waiting), self._rows.state_dict()

    def _estimated(self) -> int:
        """Return about how many batches the job gives each rank. Raises OptionRefused, ReaderError."""
        served = ServedJob(self._live.server, self._live.job_id, None, PATIENCE_S)
        progress = served.summary().progress
        if not progress.plan_done:
            detail = f"{served.name} is still planned, so that nobody knows how many steps it makes"
            raise OptionRefused(detail, field="max_steps", cure="give --max-steps, or begin later")
        samples = max(progress.samples_planned - progress.samples_rejected, 1)
        # A batch ends where the next row does not fit: half a row is left empty.
        filled = max(self._tokens - progress.tokens_planned / samples / 2, self._tokens / 2)
        num_batches: int = ceil(progress.tokens_planned / filled / get_dp_size())
        return max(num_batches, 1)


class LiveTrainer(Trainer):  # type: ignore[misc]  # of a package that mypy does not see
    """speculators' trainer, which keeps with each checkpoint what it was trained on."""

    train_loader: LiveLoader

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - theirs
        super().__init__(*arguments, **options)
        if self.resume_from_checkpoint and self.checkpointer.previous_epoch != -1:
            self.train_loader.go_on(json.loads((self.checkpointer.prev_path / STATES_FILE).read_text()))

    def train_epoch(self, epoch: int, *, step_callback: Callable[[], None] | None = None) -> None:
        """Train, and go on to keep checkpoints where there are more steps than was estimated."""
        expected = len(self.train_loader)
        interval = max(1, round(expected * self.config.checkpoint_freq))
        step = getattr(self, "_resume_local_step", 0)

        def stepped() -> None:
            nonlocal step
            step += 1
            is_late = expected - step < interval * MIN_STEP_PCT
            if self.config.checkpoint_freq < 1 and is_late and step % interval == 0:
                self.maybe_save_checkpoint(epoch, local_step=step)

        super().train_epoch(epoch, step_callback=stepped)

    def _save_training_state(self, epoch: int, local_step: int) -> None:
        super()._save_training_state(epoch, local_step)
        self.train_loader.checkpointed(self.checkpointer.path / str(epoch))


@contextmanager
def refusing_jobs() -> Iterator[None]:
    """Turn a ReaderError of the block into SourceRefused (`live`)."""
    try:
        yield
    except ReaderError as error:
        cure = "look at the job, and begin again with the same --save-path: it goes on behind its checkpoint"
        raise SourceRefused(str(error), field="live", cure=cure) from error


class _Sampler:
    """What speculators' trainer looks for to skip batches, which a follower does by its state."""

    _cached_generated_batches: object = None

    def _generate_batches(self, epoch: int) -> Sequence[object]:
        return ()


def validation(
    *,
    data_path: str,
    total_seq_len: int,
    transfer: object,
    hidden_states_dtype: torch.dtype,
    hidden_size: int,
    num_target_layers: int,
    num_workers: int,
    prefetch_factor: int,
    preprocess: Callable[[Batch], Batch] | None,
    **_: object,
) -> Any:  # noqa: ANN401 - a loader of torch
    """Return speculators' own loader, over all rows of the finished dataset."""
    rows = ArrowDataset(
        max_len=total_seq_len,
        datapath=data_path,
        transfer=transfer,
        on_missing="raise",
        hidden_states_dtype=hidden_states_dtype,
    )
    return _setup_dataloader(
        rows,
        total_seq_len,
        hidden_size,
        num_workers=num_workers,
        num_target_layers=num_target_layers,
        prefetch_factor=prefetch_factor,
        preprocess=preprocess,
    )


def _ahead(batches: Iterator[tuple[Batch, dict[str, int]]]) -> Iterator[tuple[Batch, dict[str, int]]]:
    """Make one batch while the one before is trained on; raise what making it raises.

    The thread ends with the process: it may wait for a unit that never comes.
    """
    ready: Queue[tuple[Batch, dict[str, int]] | Exception | None] = Queue(1)

    def make() -> None:
        try:
            for batch in batches:
                ready.put(batch)
            ready.put(None)
        except Exception as error:  # noqa: BLE001 - it is raised where the batch is wanted
            ready.put(error)

    Thread(target=make, daemon=True).start()
    while (item := ready.get()) is not None:
        if isinstance(item, Exception):
            with refusing_jobs():
                raise item
        yield item


def _any_rank(has_more: bool) -> bool:
    """Say whether any rank has another batch."""
    if not is_distributed():
        return has_more
    flag = torch.tensor(int(has_more), device=get_local_rank() if torch.cuda.is_available() else "cpu")
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)
