"""Schedules: a request that becomes a job at each slot of a calendar, and what the routes say of them."""

from datetime import datetime

from pydantic import AwareDatetime, Field, field_validator

from schemas.base import OpenEnum, Wire
from schemas.calendar import Calendar
from schemas.job import JobState
from schemas.names import JobId, ScheduleName
from schemas.request import ExtractRequest
from schemas.source import MAX_INLINE_SAMPLES, Sample


class Missed(OpenEnum):
    """What becomes of slots that passed while no service ran."""

    SKIP = "skip"
    """None of them runs."""
    ONCE = "once"
    """The last of them runs."""
    ALL = "all"
    """Each runs, one after another."""


class Overlap(OpenEnum):
    """What becomes of a slot whose time comes while the job of an earlier slot has not ended."""

    SKIP = "skip"
    QUEUE = "queue"
    """It waits for that job's end. Of several that wait the last one runs, or each with `missed: all`."""
    REPLACE = "replace"
    """That job is cancelled."""


class Samples(OpenEnum):
    """Which samples of its source a run takes."""

    NEW = "new"
    """Those whose content no earlier run has written under the same recipe."""
    ALL = "all"


class ChangedRecipe(OpenEnum):
    """What becomes of a run whose recipe is not that of the samples written before.

    The recipe is all that decides the states of a sample: model, revision, tokenizer, template, layers and
    limits.
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

    missed: Missed = Field(default=Missed.ONCE, description="slots that passed while no service ran")
    overlap: Overlap = Field(default=Overlap.QUEUE, description="slots while an earlier job has not ended")

    samples: Samples = Field(default=Samples.NEW, description="take new samples only, or all of the source")
    changed_recipe: ChangedRecipe = Field(
        default=ChangedRecipe.REFUSE,
        description="what to do when model, tokenizer or template are no longer those of the earlier runs",
    )

    def rules(self) -> "ScheduleRules":
        """Return these fields alone, without those of a kind of this class."""
        return ScheduleRules(**self.model_dump(include=set(ScheduleRules.model_fields)))


class NewSchedule(ScheduleRules):
    """The body of `POST /schedules`."""

    name: ScheduleName
    request: ExtractRequest = Field(description="as for `POST /extract`; its source is read anew each time")

    @field_validator("request")
    @classmethod
    def _source_that_grows(cls, request: ExtractRequest) -> ExtractRequest:
        if request.source.kind == "inline":
            raise ValueError("a schedule's source is one that can grow: inline samples never change")
        if request.part is not None:
            raise ValueError("a schedule has no 'part': in a source that grows, rows move between parts")
        return request


class PostedSamples(Wire):
    """The body of `POST /schedules/{name}/samples`."""

    samples: tuple[Sample, ...] = Field(min_length=1, max_length=MAX_INLINE_SAMPLES)


class PostedCount(Wire):
    """The answer of `POST /schedules/{name}/samples`: how many samples were posted."""

    samples: int


class ScheduleChange(Wire):
    """The body of `PATCH /schedules/{name}`: what is given is changed. A change of times counts from now."""

    cron: str | None = None
    time_zone: str | None = None
    ends_at: AwareDatetime | None = None
    missed: Missed | None = None
    overlap: Overlap | None = None
    samples: Samples | None = None
    changed_recipe: ChangedRecipe | None = None
    paused: bool | None = Field(
        default=None, description="slots of a pause are not missed; none of them runs"
    )


class RunOutcome(OpenEnum):
    """What became of a slot."""

    SUBMITTED = "submitted"
    MISSED = "missed"
    SKIPPED = "skipped"
    REFUSED = "refused"
    CUT_SHORT = "cut_short"
    """Its job failed or was cancelled; it keeps what it wrote, and the rest came in the next run."""


class RunView(Wire):
    """A slot that has passed. What is said of its job is null where there is none, or no more.

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
    owner: str | None = Field(default=None, description="the name of the key that made it")
    state: ScheduleState
    next_slots: tuple[datetime, ...] = Field(description="the next five, in UTC")
    waiting_slot: datetime | None = Field(
        default=None, description="it runs when the job of an earlier slot ends"
    )
    last_run: RunView | None = None
    last_good_at: datetime | None = Field(default=None, description="when a job of it was last completed")
    failing: bool = Field(description="the last slot was missed or refused, or its job did not complete")
    created_at: datetime


class SchedulePage(Wire):
    """Schedules by name; `next_after` is null on the last page."""

    schedules: tuple[ScheduleView, ...]
    next_after: str | None = None


class RunPage(Wire):
    """A schedule's slots, newest first; `next_before` is null on the last page."""

    runs: tuple[RunView, ...]
    next_before: datetime | None = None
