"""Every error of the service: its HTTP status, its stable type, and what happens to the work it stopped.

    QuarryError
    |-- RequestError              422  the user can fix the request; names the field and the cure
    |   |-- UnknownModel               `model`, `revision`: no such model, or no right to read it
    |   |-- UnknownLayer               `layers`: an id outside 0..N, or a preset the model is too shallow for
    |   |-- SourceRefused              `source`: missing, unreadable, empty, or outside the allowed roots
    |   |-- TemplateRefused            `chat_template`: does not render, or has no stable turn boundaries
    |   `-- OptionRefused              any other option that this model or this service cannot honour
    |-- KeyRefused                401  no key, or no valid one
    |-- CallerRefused             403  a foreign host name, another site's page, or a key without the right
    |-- NotFound                  404
    |-- Conflict                  409
    |   |-- IdempotencyConflict        same key, other body
    |   |-- IdentityChanged            a resumed job would produce another dataset
    |   |   `-- EngineChanged          it was begun with another engine, which no worker has any more
    |   |-- RecipeChanged              a schedule's job would write other states than earlier jobs
    |   `-- IllegalMove                the job's state does not allow it
    |-- QuotaExceeded             429  the key's owner has reached a limit; the job is blocked
    |-- StoreUnavailable          503  the database or the data folder cannot be used: retried, not counted
    |   `-- VersionRefused             the database has another version's tables: restart the newest service
    |-- LeaseLost                 503  another attempt owns the unit now; this one does not count
    |-- EngineRefused             500  no worker's engine can extract this: permanent
    |-- EngineDied                503  the engine stopped: the unit is retried, the worker counts the death
    |   |-- EngineStuck                it runs but does not answer: the next unit gets a new engine
    |   `-- StatesNotFinite            it yields NaN or infinity, which no second engine has confirmed yet
    |-- StatesWrong               500  rows disagree with the model, by two engines: permanent
    |-- ServiceBusy               503  too many requests at once: ask again
    |-- PlanningDied              503  the process that tokenizes died: retried, finally blocked
    |-- WriteFailed               503  a shard could not be written: retried
    |-- DiskFull                  507  the job is blocked until there is space; everything is kept
    |-- HubDenied                 403  `hub.repo_id`: no right to write; the job is blocked
    |-- HubUnavailable            503  the Hub failed or did not answer: retried
    |   `-- HubLimited                 its rate limit was hit: retried later, and not counted
    |-- WebhookFailed             502  `webhook.url` did not accept a report: retried for three days
    `-- DatasetBroken             422  `quarry verify`: a finished dataset does not match its manifest

Only an error's class decides whether work fails, is retried, or waits for a person. Its message never does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import ClassVar

from schemas.dataset.errors import NO_SPACE, DatasetError
from schemas.job import Problem

MAX_MESSAGE_CHARS = 500


class Outcome(StrEnum):
    """What an error does to the work it stopped."""

    FAIL = "fail"
    RETRY = "retry"
    BLOCK = "block"
    VOID = "void"  # retried, and the attempt does not count: the work did not cause the error


class QuarryError(Exception):
    """Base of all. `detail` and `cure` are for people; `field` is a path in the request: `source.path`."""

    status: ClassVar[int] = 500
    outcome: ClassVar[Outcome] = Outcome.FAIL
    title: ClassVar[str] = "Internal error"
    usual_cure: ClassVar[str] = "look for the traceback in the log of the service or worker, and report it"
    """The cure of an error that is given none of its own; docs/errors.md lists them."""
    wait_s: float = 0.0
    """The least time before the work is retried."""

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
            cure=self.cure or self.usual_cure,
        )


def problem_slug(kind: type[QuarryError]) -> str:
    """Return `unknown-model` of `UnknownModel`."""
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in kind.__name__).lstrip("-")


class RequestError(QuarryError):
    """The request cannot be carried out."""

    status = 422
    title = "The request cannot be carried out"
    usual_cure = "change the named field and send the request again"


class UnknownModel(RequestError):
    """The model or its revision cannot be read."""

    title = "Unknown model"
    usual_cure = "check the name and revision; a private model needs a token, and a key for its namespace"


class UnknownLayer(RequestError):
    """A layer id or preset that the model does not have."""

    title = "Unknown layer"
    usual_cure = (
        "name ids from 0 to the number of decoder layers, or a preset that the model is deep enough for"
    )


class SourceRefused(RequestError):
    """The source is missing, unreadable, empty or not allowed."""

    title = "The source cannot be read"
    usual_cure = "check the path or repository, and that its folder is among QUARRY_SOURCE_ROOTS"


class TemplateRefused(RequestError):
    """The chat template fails, or its turn boundaries are not stable."""

    title = "The chat template cannot be used"
    usual_cure = "give a `chat_template` that renders the samples, or samples with token ids"


class OptionRefused(RequestError):
    """An option that this model or this service cannot honour."""

    title = "The option cannot be honoured"
    usual_cure = "leave the option out, or change the named setting"


class KeyRefused(QuarryError):
    """The request has no key, or one that is unknown, revoked or expired."""

    status = 401
    title = "A key is needed"
    usual_cure = "send 'Authorization: Bearer qk_...' with a valid key"


class CallerRefused(QuarryError):
    """The host name is not the service's, another site's page sent this, or the key does not allow it."""

    status = 403
    title = "The caller is refused"
    usual_cure = "use a key with the named right, or a host name in QUARRY_ALLOWED_HOSTS"


class NotFound(QuarryError):
    """The requested object does not exist."""

    status = 404
    title = "Not found"
    usual_cure = "check the id or name; objects of other owners count as missing"


class Conflict(QuarryError):
    """The request contradicts what is stored."""

    status = 409
    title = "Conflict"
    usual_cure = "check the stored state, and send a request that fits it"


class IdempotencyConflict(Conflict):
    """The idempotency key was used with another body."""

    title = "Idempotency key used with another body"
    usual_cure = "send the request with another Idempotency-Key"


class IdentityChanged(Conflict):
    """The job would produce another dataset."""

    title = "The dataset's identity changed"
    usual_cure = "submit a new job: the model, source or engine has changed since this one began"


class EngineChanged(IdentityChanged):
    """The job was begun with another engine; it is left to workers that have that one."""

    outcome = Outcome.BLOCK
    title = "The job was begun with another engine"
    usual_cure = "start a worker with that engine and resume, or submit a new job"


class RecipeChanged(Conflict):
    """The model, tokenizer or template differs from the schedule's earlier runs."""

    title = "The schedule's recipe changed"
    usual_cure = "pin the model's revision, or set the schedule's `changed_recipe` to `begin_anew`"


class IllegalMove(Conflict):
    """The job's state does not allow this."""

    title = "Not possible in this state"
    usual_cure = "check the job's state; a completed job cannot change: submit a new one"


class QuotaExceeded(QuarryError):
    """A limit of the caller's key is reached."""

    status = 429
    outcome = Outcome.BLOCK
    title = "The key's limit is reached"
    usual_cure = "wait, delete jobs, or ask an admin for a key with higher limits; then resume the job"


class StoreUnavailable(QuarryError):
    """The database does not answer, or the data folder cannot be written."""

    status = 503
    outcome = Outcome.VOID
    title = "The store is not available"
    usual_cure = "check the database and the disk of QUARRY_DATA_DIR; interrupted work is retried"


class VersionRefused(StoreUnavailable):
    """The database has the tables of another version."""

    title = "The database has another version"
    usual_cure = "run one version of Quarry on the database: restart the older processes"


class LeaseLost(QuarryError):
    """Another attempt owns the unit or the role. Nothing of this attempt counts."""

    status = 503
    outcome = Outcome.RETRY
    title = "Lease lost"
    usual_cure = "nothing to do: another attempt continues"


class EngineRefused(QuarryError):
    """The engine cannot extract what the job needs, and no other worker takes the job."""

    title = "The engine cannot extract this"
    usual_cure = "see the job's problem for what vLLM refuses; change the model or the engine's options"


class EngineDied(QuarryError):
    """The engine stopped."""

    status = 503
    outcome = Outcome.VOID
    title = "The engine stopped"
    usual_cure = "see the problem's detail, or the worker's log if it says no cause; the unit runs again"


class EngineStuck(EngineDied):
    """The engine runs but does not answer. A new one is started."""

    title = "The engine does not answer"
    usual_cure = "check the GPU; raise QUARRY_ENGINE_SILENCE_S if an answer may take that long"


class StatesNotFinite(EngineDied):
    """The engine yields NaN or infinity. Another one is started, to confirm the same rows."""

    title = "States are not finite"
    usual_cure = "check the GPU, unless the next engine finds the same rows so and rejects them"


class StatesWrong(QuarryError):
    """Captured states disagree with the model. Once two engines have said so, the job fails."""

    title = "Captured states are wrong"
    usual_cure = (
        "report this, with the canary's report in the job's problem; the rows were refused and not stored"
    )


class ServiceBusy(QuarryError):
    """The service is busy with other requests."""

    status = 503
    outcome = Outcome.RETRY
    title = "The service is busy"
    usual_cure = "retry after the number of seconds in Retry-After"


class PlanningDied(QuarryError):
    """The process that reads, renders and tokenizes died, and not because of the source or template."""

    status = 503
    outcome = Outcome.RETRY
    title = "Planning stopped"
    usual_cure = "check the planner's log, and the kernel's for lack of memory; planning is retried"


class WriteFailed(QuarryError):
    """A shard could not be written."""

    status = 503
    outcome = Outcome.RETRY
    title = "A shard could not be written"
    usual_cure = "fix the permissions or the disk that is named; the unit is written again"


class DiskFull(QuarryError):
    """No space is left for shards."""

    status = 507
    outcome = Outcome.BLOCK
    title = "The disk is full"
    usual_cure = "free space, or delete jobs; then resume the job: everything is kept"


class HubDenied(QuarryError):
    """The Hub refuses this token or repository."""

    status = 403
    outcome = Outcome.BLOCK
    title = "The Hub refuses"
    usual_cure = "set QUARRY_HUB_TOKEN_FILE to a token that may write there; then resume the job"


class HubUnavailable(QuarryError):
    """The Hub failed or did not answer."""

    status = 503
    outcome = Outcome.RETRY
    title = "The Hub is not available"
    usual_cure = "jobs retry it automatically, repeat other requests; check the Hub's status if this persists"


class HubLimited(HubUnavailable):
    """The Hub's rate limit was exceeded; it asks for a pause of `wait_s`."""

    outcome = Outcome.VOID
    title = "The Hub's rate limit is reached"
    usual_cure = "nothing to do: it continues after the pause that the Hub asked for"


class WebhookFailed(QuarryError):
    """The webhook's URL did not accept the report of a job."""

    status = 502
    outcome = Outcome.RETRY
    title = "The webhook was not taken"
    usual_cure = "check the receiver's log; 'quarry jobs redeliver ID' sends the report again"


class DatasetBroken(QuarryError):
    """A finished dataset does not match its manifest."""

    status = 422
    title = "The dataset is broken"
    usual_cure = "capture the named units again, or get an intact copy of the dataset"


def internal_error(error: Exception) -> QuarryError:
    """Return the error that a job reports for an unforeseen exception."""
    # It may quote what a user wrote: as ASCII it fits any database.
    message = ascii(error)[:MAX_MESSAGE_CHARS]
    return QuarryError(f"internal error: {message}", cure="look for the traceback in the worker's log")


@contextmanager
def removing() -> Iterator[None]:
    """Translate errors of removing folders. Raises WriteFailed."""
    try:
        yield
    except OSError as error:
        cure = "fix the rights of that folder; it is tried again"
        raise WriteFailed(f"{error.filename} cannot be removed: {error.strerror}", cure=cure) from error


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Translate errors of writing `what`: a full disk blocks the job, everything else is retried.

    Raises DiskFull, WriteFailed.
    """
    try:
        yield
    except DatasetError as error:
        raise WriteFailed(f"{what} cannot be written: {error}") from error
    except OSError as error:
        if error.errno in NO_SPACE:
            cure = "free space in the data folder, then resume the job"
            raise DiskFull(f"there is no space left for {what}", cure=cure) from error
        raise WriteFailed(f"{what} cannot be written: {error.strerror or error}") from error


STORE_AWAY = (StoreUnavailable, DiskFull)
"""The store cannot be used now. Work that could not be recorded is retried when its lease expires."""
