"""Every error of the service.

Its HTTP status, its stable type, and what happens to the work when it is raised.

    QuarryError
    |-- RequestError              422  what a user can mend in the request; names the field and the cure
    |   |-- UnknownModel               `model`, `revision`: no such model, or no right to read it
    |   |-- UnknownLayer               `layers`: an id outside 0..N, or a preset the model is too shallow for
    |   |-- SourceRefused              `source`: missing, unreadable, empty, or outside the allowed roots
    |   |-- TemplateRefused            `chat_template`: does not render, or has no stable turn boundaries
    |   `-- OptionRefused              any other option that this model or this service cannot honour
    |-- CallerRefused             403  the request came by a foreign name, or from a page of another site
    |-- NotFound                  404
    |-- Conflict                  409
    |   |-- IdempotencyConflict        same key, other body
    |   |-- IdentityChanged            a resumed job would no longer be the same dataset
    |   `-- IllegalMove                the job's state does not allow it
    |-- StoreUnavailable          503  the database or the data folder cannot be used now: void, tried again
    |-- LeaseLost                 503  another attempt owns the unit now; this one is void
    |-- EngineRefused             500  the engine cannot be driven rightly: permanent
    |-- EngineDied                503  the engine stopped: the unit is tried again
    |   `-- EngineStuck                it runs, but hands nothing over: the next unit gets another engine
    |-- StatesWrong               500  rows that disagree with the model: permanent, never published
    |-- WriteFailed               503  a shard could not be written: tried again
    |-- DiskFull                  507  waits for space: the job is blocked, everything is kept
    |-- HubDenied                 403  `hub.repo_id`: no right to write; the job is blocked
    |-- HubUnavailable            503  the Hub did not answer rightly: tried again
    `-- DatasetBroken             422  `quarry verify`: something in a finished dataset is wrong

An error's class alone decides between failing, trying again and waiting for a person; its message never
does.
"""

from enum import StrEnum
from typing import ClassVar

from schemas.job import Problem


class Outcome(StrEnum):
    """What an error does to the work it stopped."""

    FAIL = "fail"
    RETRY = "retry"
    BLOCK = "block"
    VOID = "void"  # tried again, and the try does not count: the work had no part in the error


class QuarryError(Exception):
    """Base of all. `detail` is for people; `field` is a path in the request such as `source.path`.

    `cure` is what to do.
    """

    status: ClassVar[int] = 500
    outcome: ClassVar[Outcome] = Outcome.FAIL
    title: ClassVar[str] = "Internal error"

    def __init__(self, detail: str, *, field: str | None = None, cure: str | None = None) -> None:
        """Keep the three parts apart, so that a problem document can name the field."""
        super().__init__(detail)
        self.detail = detail
        self.field = field
        self.cure = cure

    def problem(self) -> Problem:
        """Return the RFC 9457 document of this error; `type` is the class name in kebab case."""
        return Problem(
            type=f"urn:quarry:{problem_slug(type(self))}",
            title=self.title,
            status=self.status,
            detail=self.detail,
            field=self.field,
            cure=self.cure,
        )


def problem_slug(kind: type[QuarryError]) -> str:
    """Return `unknown-model` of `UnknownModel`."""
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in kind.__name__).lstrip("-")


class RequestError(QuarryError):
    """The request cannot be carried out as it stands."""

    status = 422
    title = "The request cannot be carried out"


class UnknownModel(RequestError):
    """The model or its revision cannot be read."""

    title = "Unknown model"


class UnknownLayer(RequestError):
    """A layer id or preset that the model does not have."""

    title = "Unknown layer"


class SourceRefused(RequestError):
    """The source is missing, unreadable, empty or not allowed."""

    title = "The source cannot be read"


class TemplateRefused(RequestError):
    """The chat template fails, or its turn boundaries are not stable."""

    title = "The chat template cannot be used"


class OptionRefused(RequestError):
    """An option that this model or this service cannot honour."""

    title = "The option cannot be honoured"


class CallerRefused(QuarryError):
    """The request came by a name that is not the service's, or from a page of another site."""

    status = 403
    title = "The caller is refused"


class NotFound(QuarryError):
    """No such thing."""

    status = 404
    title = "Not found"


class Conflict(QuarryError):
    """The request is at odds with what is stored."""

    status = 409
    title = "Conflict"


class IdempotencyConflict(Conflict):
    """The idempotency key was used with another body."""

    title = "Idempotency key used with another body"


class IdentityChanged(Conflict):
    """The job would no longer be the same dataset."""

    title = "The dataset's identity changed"


class IllegalMove(Conflict):
    """The job's state does not allow this."""

    title = "Not possible in this state"


class StoreUnavailable(QuarryError):
    """The database does not answer or has another version's tables, or the data folder cannot be written."""

    status = 503
    outcome = Outcome.VOID
    title = "The store is not available"


class LeaseLost(QuarryError):
    """Another attempt owns the unit or the role; what this one made is void."""

    status = 503
    outcome = Outcome.RETRY
    title = "Lease lost"


class EngineRefused(QuarryError):
    """The engine cannot be driven rightly."""

    title = "The engine cannot extract this"


class EngineDied(QuarryError):
    """The engine stopped."""

    status = 503
    outcome = Outcome.RETRY
    title = "The engine stopped"


class EngineStuck(EngineDied):
    """The engine runs, but does not do what it was asked: another one is started."""

    title = "The engine does not answer"


class StatesWrong(QuarryError):
    """Captured states disagree with the model."""

    title = "Captured states are wrong"


class WriteFailed(QuarryError):
    """A shard could not be written."""

    status = 503
    outcome = Outcome.RETRY
    title = "A shard could not be written"


class DiskFull(QuarryError):
    """No space is left for shards."""

    status = 507
    outcome = Outcome.BLOCK
    title = "The disk is full"


class HubDenied(QuarryError):
    """The Hub refuses this token or repository."""

    status = 403
    outcome = Outcome.BLOCK
    title = "The Hub refuses"


class HubUnavailable(QuarryError):
    """The Hub did not answer rightly."""

    status = 503
    outcome = Outcome.RETRY
    title = "The Hub is not available"


class DatasetBroken(QuarryError):
    """A finished dataset does not say what its manifest says."""

    status = 422
    title = "The dataset is broken"


STORE_AWAY = (StoreUnavailable, DiskFull)
"""The store cannot be asked or told now. What is not recorded shows when its lease expires."""
