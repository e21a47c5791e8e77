"""`quarry train speculators --live`: speculators' own command, fed with a job's rows as they are captured.

Rows come from `QuarryStream.follow`, in one epoch, and are packed as they arrive. A checkpoint includes the
position up to which it was trained, which is acknowledged once the checkpoint is on disk, so that a killed
trainer continues there.

Imports speculators: import it lazily.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from speculators.train import cli
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.dataloader import _setup_dataloader
from speculators.train.distributed import get_dp_rank, get_dp_size, get_sp_size, is_distributed
from speculators.train.trainer import MIN_STEP_PCT, Trainer

from schemas.job import ENDED_JOB_STATES, JobState
from service.errors import OptionRefused
from service.export.formats.speculators import row_tensors
from service.export.options import ExportOptions
from service.reader import QuarryStream, ReaderError
from service.reader.follow import State
from service.reader.row import About, Row
from service.reader.served import LOOK_S, ServedJob
from service.trainers.ahead import Ahead, Batch, any_rank, of_first_rank, refusing_jobs
from service.trainers.checkpoints import STAGED, put_in_place

STATES_FILE = "quarry_rows.json"
"""In a checkpoint: the position of each rank."""
PATIENCE_S = 600.0
"""How long to wait for a service that does not answer."""
MARGIN = 1.1
"""Factor on the estimated number of steps: if it is too low, the learning rate reaches zero before the
end.
"""


@dataclass(frozen=True, slots=True)
class Live:
    """A followed job: its address, the consumer that acknowledges rows, and what its rows must match."""

    server: str
    job_id: str
    consumer: str | None
    about: About
    """The description of the validation dataset's rows."""
    options: ExportOptions
    check: bool

    @classmethod
    def at(
        cls, address: str, consumer: str | None, about: About, options: ExportOptions, *, check: bool
    ) -> "Live":
        """Parse the job's URL. Raises OptionRefused (`live`)."""
        server, found, job_id = address.rstrip("/").rpartition("/jobs/")
        if not found:
            cure = "give the job's URL, such as http://host:8642/jobs/j-0123456789abcdef"
            raise OptionRefused(f"{address} names no job", field="live", cure=cure)
        return cls(server, job_id, consumer, about, options, check)

    def train_by(self, max_steps: int | None) -> None:
        """Make speculators' command take its rows from the job from now on."""

        def loaders(**options: Any) -> tuple["LiveLoader", Any]:  # noqa: ANN401 - theirs
            return LiveLoader(self, max_steps, **options), validation(**options)

        cli.__dict__.update(create_train_val_loaders=loaders, Trainer=LiveTrainer)


@dataclass(frozen=True, slots=True)
class TrainerRow:
    """Converts a row as speculators' own dataset does."""

    live: Live

    def check(self, about: About) -> None:
        """Raise ReaderError if the job is of another model, or lacks a layer."""
        # For a model on the Hub, the digest of the weights is None: its commit identifies it.
        kept = self.live.about
        if (about.revision, about.weights_sha256) != (kept.revision, kept.weights_sha256):
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
    """Packed batches of one rank, until no rank has another; ranks without one get an empty batch meanwhile.

    It runs in the trainer's own process, since a follower's state belongs to the process that iterates it,
    and each batch needs its state. A batch is made from whole rows by speculators' collator; each tensor is
    [1, total_seq_len, ...].

    It has what speculators' trainer needs from a loader: a length, which is an estimate, and a sampler.
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
        where["check"] = live.check
        self._rows = QuarryStream.follow(live.server, live.job_id, view=TrainerRow(live), **where)
        self._state = self._rows.state_dict()
        self.batch_sampler = _Sampler()
        self.keep: Callable[[], None] = lambda: None
        """Makes a checkpoint."""
        self._is_kept = True
        with refusing_jobs():
            self._length = max_steps or of_first_rank(self._estimated)
            self._acknowledge()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        batches = Ahead(self._packed())
        while True:
            batches.wait()
            if any_rank(batches.is_late):
                # Ranks train in lockstep, so either all have trained since the last checkpoint, or none has.
                if not self._is_kept:
                    self.keep()
            elif not any_rank(not batches.have_ended):
                return
            else:
                batch, state = batches.take() or (self._collate([]), self._state)
                self._state, self._is_kept = state, False
                yield batch

    def go_on(self, folder: Path) -> None:
        """Continue after the rows that a checkpoint was trained on, and acknowledge them again.

        Raises OptionRefused (`save_path`), SourceRefused (`live`).
        """
        try:
            states = json.loads((folder / STATES_FILE).read_text())
        except FileNotFoundError as error:
            detail = f"the checkpoint {folder} was not made by a live training"
            raise OptionRefused(detail, field="save_path", cure="name another folder") from error
        if len(states) != get_dp_size():
            detail = f"the checkpoint {folder} is of {len(states)} ranks, and not of {get_dp_size()}"
            raise OptionRefused(detail, field="save_path", cure="go on with as many") from None
        self._state = states[get_dp_rank()]
        with refusing_jobs():
            self._rows.load_state_dict(self._state)
            self._acknowledge(states)

    def checkpointed(self, staged: Path, final: Path) -> None:
        """Put a checkpoint with all ranks' positions in place; then acknowledge what they have trained on.

        Raises SourceRefused (`live`) if the acknowledgement fails: capture would wait for it.
        """
        self._is_kept, states = True, [self._state]
        if is_distributed():
            states = [self._state] * get_dp_size()
            dist.all_gather_object(states, self._state)
        if get_dp_rank() == 0:
            (staged / STATES_FILE).write_text(json.dumps(states))
            put_in_place(staged, final)
            with refusing_jobs():
                self._acknowledge(states)

    def _acknowledge(self, states: Sequence[State] = ()) -> None:
        """Acknowledge what no state needs; without states, only register the consumer. Raises ReaderError."""
        if self._live.consumer is not None and get_dp_rank() == 0:
            self._rows.acknowledge(self._live.consumer, states)

    def _packed(self) -> Iterator[tuple[Batch, State]]:
        """Yield batches of whole rows, each with the state after it; runs in the thread of `Ahead`."""
        waiting: list[Batch] = []
        num_tokens, state = 0, self._state
        for row in self._rows:
            length = int(row["lengths"])
            if waiting and num_tokens + length > self._tokens:
                yield self._collate(waiting), state
                waiting, num_tokens = [], 0
            waiting.append(row)
            num_tokens, state = num_tokens + length, self._rows.state_dict()
        if waiting:  # the last rows: nothing more of the job is needed
            yield self._collate(waiting), self._rows.state_dict()

    def _estimated(self) -> int:
        """Estimate how many batches the job gives each rank. Raises OptionRefused, ReaderError."""
        served = ServedJob(self._live.server, self._live.job_id, None, PATIENCE_S)
        while True:
            job = served.summary()
            progress = job.progress
            if job.state in ENDED_JOB_STATES and job.state is not JobState.COMPLETED:
                raise ReaderError(f"{served.name} is {job.state}{served.problem()}")
            if not progress.plan_done:
                detail = f"{served.name} is still planned, so that nobody knows how many steps it makes"
                raise OptionRefused(detail, field="max_steps", cure="give --max-steps, or begin later")
            if progress.samples_written or job.state in ENDED_JOB_STATES:
                break
            time.sleep(LOOK_S)  # the length of answers is known once there are some
        length = progress.tokens_written / max(progress.samples_written, 1)
        num_tokens = length * (progress.samples_planned - progress.samples_rejected)
        # A batch ends when the next row does not fit, which leaves half a row empty on average.
        filled = max(self._tokens - length / 2, self._tokens / 2)
        num_batches: int = ceil(MARGIN * num_tokens / filled / get_dp_size())
        return max(num_batches, 1)


class LiveTrainer(Trainer):  # type: ignore[misc]  # of a package that mypy does not see
    """speculators' trainer, which stores the rows' position with each checkpoint."""

    train_loader: LiveLoader

    def __init__(self, model: Any, config: Any, *loaders: Any) -> None:  # noqa: ANN401 - theirs
        super().__init__(model, config, *loaders)
        if self.resume_from_checkpoint and self.checkpointer.previous_epoch != -1:
            self.train_loader.go_on(self.checkpointer.prev_path)

    def train_epoch(self, epoch: int, *, step_callback: Callable[[], None] | None = None) -> None:
        """Train, and continue to make checkpoints if there are more steps than estimated."""
        expected = len(self.train_loader)
        interval = max(1, round(expected * self.config.checkpoint_freq))
        step = getattr(self, "_resume_local_step", 0)

        def stepped() -> None:
            nonlocal step
            step += 1
            is_late = expected - step < interval * MIN_STEP_PCT
            if self.config.checkpoint_freq < 1 and is_late and step % interval == 0:
                self.maybe_save_checkpoint(epoch, local_step=step)

        self.train_loader.keep = lambda: self.maybe_save_checkpoint(epoch, local_step=step)
        super().train_epoch(epoch, step_callback=stepped)

    def maybe_save_checkpoint(self, epoch: int | str, local_step: int = 0) -> None:
        """Make a checkpoint atomically.

        None is made if training was interrupted: the rows since the last checkpoint will be repeated.
        """
        if not isinstance(epoch, int):
            return
        place = self.checkpointer.path
        self.checkpointer.path = place / STAGED
        try:
            super().maybe_save_checkpoint(epoch, local_step)
        finally:
            self.checkpointer.path = place
        self.train_loader.checkpointed(place / STAGED / str(epoch), place / str(epoch))


class _Sampler:
    """What speculators' trainer uses to skip batches; a follower skips rows by its state instead."""

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
