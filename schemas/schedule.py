"""Schedules: a request that becomes a job at each slot of a calendar, and how the routes show them."""

from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, Field

from schemas.base import OpenEnum, Wire
from schemas.calendar import Calendar
from schemas.job import JobState, Problem
from schemas.names import JobId, ScheduleName
from schemas.request import ExtractRequest
from schemas.source import MAX_INLINE_SAMPLES, Sample


class Missed(OpenEnum):
    """What to do with slots that passed while no worker ran."""

    SKIP = "skip"
    """None of them runs."""
    ONCE = "once"
    """The last of them runs."""
    ALL = "all"
    """Each runs, one after another."""


class Overlap(OpenEnum):
    """What to do at a slot while the job of an earlier slot has not ended."""

    SKIP = "skip"
    QUEUE = "queue"
    """It waits until that job ends. Of several waiting slots the last runs, or each with `missed: all`."""
    REPLACE = "replace"
    """That job is cancelled."""


class Samples(OpenEnum):
    """Which samples of the source a run takes."""

    NEW = "new"
    """Those whose content no earlier run has written under the same recipe."""
    ALL = "all"


class ChangedRecipe(OpenEnum):
    """What to do with a run whose recipe is not that of the samples written before.

    The recipe is everything that determines the states of a sample: model, revision, tokenizer, template,
    layers and limits.
    """

    REFUSE = "refuse"
    """Its job fails and says what changed."""
    BEGIN_ANEW = "begin_anew"
    """It takes all samples that were not written under this recipe."""


class ScheduleState(OpenEnum):
    """Whether a schedule has slots to come."""

    ACTIVE = "active"
    PAUSED = "paused"
    ENDED = "ended"


class ScheduleRules(Calendar):
    """When a schedule's jobs are made, and which samples they take."""

    missed: Missed = Field(
        default=Missed.ONCE, description="what to do with slots that passed while no worker ran"
    )
    overlap: Overlap = Field(
        default=Overlap.QUEUE, description="what to do while an earlier job has not ended"
    )

    samples: Samples = Field(default=Samples.NEW, description="take only new samples, or all of the source")
    changed_recipe: ChangedRecipe = Field(
        default=ChangedRecipe.REFUSE,
        description="what to do when the model, tokenizer or template differs from the earlier runs",
    )

    def rules(self) -> "ScheduleRules":
        """Return only these fields, without those of a subclass."""
        return ScheduleRules(**self.model_dump(include=set(ScheduleRules.model_fields)))


def _source_that_grows(request: ExtractRequest) -> ExtractRequest:
    if request.source.kind == "inline":
        raise ValueError("a schedule's source is one that can grow: inline samples never change")
    if request.part is not None:
        raise ValueError("a schedule has no 'part': in a source that grows, rows move between parts")
    return request


RepeatedRequest = Annotated[ExtractRequest, AfterValidator(_source_that_grows)]
"""A request of which a job can be made again and again."""


class NewSchedule(ScheduleRules):
    """The body of `POST /schedules`."""

    name: ScheduleName
    request: RepeatedRequest = Field(description="as for `POST /extract`; each run reads the source again")


class PostedSamples(Wire):
    """The body of `POST /schedules/{name}/samples`."""

    samples: tuple[Sample, ...] = Field(min_length=1, max_length=MAX_INLINE_SAMPLES)


class PostedCount(Wire):
    """The answer of `POST /schedules/{name}/samples`: how many samples were posted."""

    samples: int


class ScheduleChange(Wire):
    """The body of `PATCH /schedules/{name}`: the given fields are changed. New times apply from now on."""

    cron: str | None = None
    time_zone: str | None = None
    ends_at: AwareDatetime | None = None
    missed: Missed | None = None
    overlap: Overlap | None = None
    samples: Samples | None = None
    changed_recipe: ChangedRecipe | None = None
    request: RepeatedRequest | None = Field(
        default=None, description="of the jobs that are made from now on, in place of the one before"
    )
    paused: bool | None = Field(
        default=None, description="slots during a pause do not run and do not count as missed"
    )


class RunOutcome(OpenEnum):
    """The outcome of a slot."""

    SUBMITTED = "submitted"
    MISSED = "missed"
    SKIPPED = "skipped"
    REFUSED = "refused"
    CUT_SHORT = "cut_short"
    """Its job failed or was cancelled; it keeps what it wrote, and the next run took the rest."""


class RunView(Wire):
    """A slot that has passed. Facts about its job are null if there is none or it was deleted.

    `detail` says why there is no job, or why it did not complete.
    """

    slot: datetime
    outcome: RunOutcome
    at: datetime
    detail: str | None = None
    job_id: JobId | None = None
    job_state: JobState | None = None
    samples_written: int | None = None
    samples_rejected: int | None = None


class ScheduleView(ScheduleRules):
    """A schedule without its request."""

    name: ScheduleName
    owner: str | None = Field(default=None, description="name of the key that made it")
    state: ScheduleState
    next_slots: tuple[datetime, ...] = Field(description="the next five, in UTC")
    waiting_slot: datetime | None = Field(
        default=None, description="a slot that runs when the job of an earlier slot ends"
    )
    last_run: RunView | None = None
    last_good_at: datetime | None = Field(default=None, description="when one of its jobs last completed")
    failing: bool = Field(description="the last slot was missed or refused, or its job did not complete")
    created_at: datetime


class UnreadableSchedule(Wire):
    """A schedule whose stored rules or last job are damaged, or of a later version. It makes no job."""

    name: ScheduleName
    owner: str | None = None
    problem: Problem


class SchedulePage(Wire):
    """Schedules by name; `next_after` is null on the last page."""

    schedules: tuple[ScheduleView, ...]
    unreadable: tuple[UnreadableSchedule, ...] = ()
    next_after: str | None = None


class RunPage(Wire):
    """A schedule's slots, newest first; `next_before` is null on the last page."""

    runs: tuple[RunView, ...]
    next_before: datetime | None = None
