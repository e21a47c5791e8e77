"""Settings: environment variables with the prefix `QUARRY_`, secrets from files."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, SecretStr, ValidationError, field_validator
from pydantic_core import to_json
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from schemas.keys import EVERY_NAMESPACE, Grants
from schemas.names import MAX_RANKS
from schemas.worker import AT_HOME, Role
from service.errors import HubDenied, OptionRefused
from service.logs import log_to_stderr


class Settings(BaseSettings):
    """Everything that can be set. One instance is made at start and passed down.

    Nothing reads the environment later. `docs/settings.md` is made of the fields and their docstrings.
    """

    model_config = SettingsConfigDict(
        env_prefix="QUARRY_",
        extra="forbid",
        frozen=True,
        secrets_dir=None,
        env_ignore_empty=True,
        use_attribute_docstrings=True,
    )

    data_dir: Path = Path("quarry-data")
    """Folder of the database and attempts, and of the finished datasets, `jobs/<job>/`.

    One file system: files are renamed between the folders in it.
    """
    out_dir: Path | None = None
    """Set by `quarry extract --out` alone; unset: each job's dataset is below `data_dir/jobs/`."""
    database_url: SecretStr | None = None
    """SQLAlchemy URL; unset: SQLite at `data_dir/quarry.db`. PostgreSQL: `postgresql+psycopg://...`.

    PostgreSQL's `synchronous_commit` must not be off (its default is on): a commit that is lost after it was
    acknowledged is lost rows.
    """
    source_roots: tuple[Path, ...] = ()
    """Folders that file sources may be read from. Without any, file sources are refused."""
    model_roots: tuple[Path, ...] = ()
    """Folders that local models may be loaded from. Without any, only models on the Hub are loaded."""

    host: str = "127.0.0.1"
    """Address that the API listens on."""
    port: int = Field(default=8642, ge=0, le=65535)
    """Port that the API listens on; 0 takes a free one."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names that callers reach the API by, beside loopback names, `host` and the address called."""
    admin_key_file: Path | None = None
    """File that holds the operator's API key, a word of 32 characters or more; read at each use.

    Further keys are made with it: `quarry keys add`. Without it and without keys the API is served on the
    loopback alone, to every local caller.
    """
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024)
    """Largest request body. Each object, list and field in it counts as 16 bytes more."""
    request_timeout_s: float = Field(default=60.0, gt=0)
    """Time within which a caller must send a request whole, or go on taking the answer."""
    max_connections: int = Field(default=1000, ge=16)
    """Open connections; beyond it the one that has been silent for longest is closed."""
    event_listeners: int = Field(default=256, ge=1)
    """Event streams, and requests for units, of one API key or of all who send none; together half of the
    connections."""
    roles: tuple[Role, ...] = tuple(Role)
    """What workers do, as JSON; `quarry worker --roles`. `["capture", "store"]` needs no data folder.

    `QUARRY_DATA_DIR` is then scratch of this machine: captured units lie there until they are stored.
    """
    host_lost_s: float = Field(default=1800.0, ge=60.0)
    """Silence after which the units of a machine without the data folder that are not stored run again."""
    scratch_bytes: int | None = Field(default=None, ge=2**20)
    """Bytes of shards that may wait to leave: for their upload, of jobs with `storage.keep_local: false`, and
    of all where the data folder is not; for their consumers, of jobs with `storage.retention: consumed`.

    Unset: no bound. Units of such jobs are captured up to it, and go on when some have left.
    """
    min_free_bytes: int = Field(default=2**30, ge=0)
    """Free space in the data folder below which no job, schedule or sample is taken."""

    webhook_secret_file: Path | None = None
    """File of 32 random characters or more, from which the secrets that webhooks are signed with are made.

    Without it jobs with a webhook are refused.
    """
    webhook_hosts: tuple[str, ...] = ()
    """Hosts of webhooks whose addresses may be private, as JSON. Of others only public ones are called."""

    hub_endpoint: str | None = None
    """Base URL of the Hub; unset: the public one."""
    hub_token: SecretStr | None = None
    """The Hub token. A file is safer."""
    hub_namespaces: tuple[str, ...] | None = None
    """Users and organizations of the Hub that the token is used for, as JSON; unset or `["*"]`: all.

    A job pushes to these alone. Of others it reads what is public.
    """
    hub_token_file: Path | None = None
    """File that holds the Hub token; read at each use, so that it can be replaced while the service runs."""

    engine: str = "service.capture.vllm_engine:VllmEngine"
    """Import path of the engine class."""
    engine_options: dict[str, JsonValue] = {}
    """More keyword arguments of vLLM's engine, as JSON. Options that would spoil rows are refused."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=MAX_RANKS)
    """GPUs that the model is split over."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of the GPU's memory that the engine takes; unset: vLLM's default."""
    cpu_kv_cache_gib: int = Field(default=2, ge=1)
    """KV cache of the engine's CPU build, which would otherwise take nine tenths of the machine's memory."""
    engine_start_timeout_s: float = Field(default=1800.0, gt=0)
    """How long the engine may take to start."""
    engine_silence_s: float = Field(default=3600.0, gt=0)
    """How long an engine may leave requests unanswered before it is replaced: more than an answer takes."""
    pool_bytes: int = Field(default=1 * 2**30, ge=2**16)
    """Host memory that a connector worker drains through; at least one sample of the longest length."""
    writer_threads: int | None = Field(default=None, ge=1, le=64)
    """Threads of each rank that write rows, and as many that encode them.

    Unset: half of its share of the cores, 2 to 8.
    """

    lease_s: float = Field(default=60.0, ge=1.0)
    """How long a unit, a plan or a repository stays with a silent owner."""
    keep_jobs_days: float | None = Field(default=None, ge=0.0)
    """Days after its end that a job is kept; unset: forever. What it pushed stays on the Hub."""
    delete_old_datasets: bool = False
    """Delete a job's dataset from the data folder with the job, when `keep_jobs_days` are over."""
    planners: int = Field(default=2, ge=1, le=16)
    """Jobs that one worker plans at once, each in a child of its own."""
    publishers: int = Field(default=3, ge=1, le=64)
    """Datasets that one worker publishes at once; a repository has one publisher at a time."""
    poll_s: float = Field(default=0.5, gt=0)
    """How often an idle worker looks for work."""
    unit_attempts: int = Field(default=3, ge=1, le=100)
    """Attempts at a unit before its job fails; ten workers that die silently over one unit block the job.

    The death of an engine is no attempt.
    """
    engine_rest_s: float = Field(default=3600.0, gt=0)
    """How long a worker takes no unit of a model over which its engine died three times in a row."""
    unit_max_samples: int = Field(default=4096, ge=1, le=65_536)
    """Most samples of a unit."""
    units_in_flight: int = Field(default=2, ge=1, le=16)
    """Units whose rows one worker has in its engine at once, so that it sees no bubble between them."""
    units_in_proof: int = Field(default=4, ge=0, le=64)
    """Units that may wait for receipt, proof and commit beside those; a core proves about 1 GB/s."""
    in_flight_tokens: int = Field(default=65_536, ge=1)
    """Most tokens that one worker has in its engine at once. Several batches keep the engine full."""
    in_flight_requests: int = Field(default=512, ge=1)
    """Most requests that one worker has in its engine at once."""
    plan_row_cpu_s: float = Field(default=60.0, gt=0)
    """CPU time of planning one row, or of loading the tokenizer, after which the job fails."""
    plan_silence_s: float = Field(default=600.0, gt=0)
    """How long one row may take while no CPU time passes, as on a disk that does not answer; where a dataset
    is verified, how long one row, or 1 MiB of a file, may take at all."""
    plan_memory_bytes: int = Field(default=2 * 2**30, ge=2**24)
    """Memory that the tokenizer, the template and the row that is read may take, beside the libraries; so may
    the card and the jobs of a repository that is pushed to."""
    estimates_at_once: int = Field(default=2, ge=1, le=64)
    """Estimates that the API makes at once, half of them for one key's owner; another is a 429."""
    worker_metrics_port: int | None = Field(default=None, ge=1, le=65_535)
    """Port of a worker's own `/metrics`, which asks for no key; the next one of `--workers` takes the next.

    vLLM then keeps its statistics, which are there too. Unset: none.
    """
    worker_metrics_host: str = "127.0.0.1"
    """Address that workers' `/metrics` are listened on; `0.0.0.0` for a Prometheus elsewhere."""
    log_format: Literal["text", "json"] = "text"
    """Of the log lines of services and workers; `json`: an object a line, with job, unit and epoch."""
    receipt_timeout_s: float = Field(default=600.0, gt=0)
    """How long the last rows of a unit may take to be written after the engine has answered them all."""
    drain_s: float = Field(default=120.0, ge=0)
    """After SIGTERM: how long units in the engine may take to end before they are given back."""
    read_memory_bytes: int = Field(default=8 * 2**30, ge=2**26)
    """Memory that `quarry verify` may take beside its libraries to read a dataset, which is not trusted."""
    publish_attempts: int = Field(default=24, ge=1)
    """Attempts at a push without a new commit before its job is blocked; each lasts up to 15 minutes."""
    canary_max_bytes: int | None = Field(default=None, ge=1)
    """Memory that the canary's reference may take for its largest layer; unset: half of what is available."""

    @field_validator("roles")
    @classmethod
    def _what_is_captured_leaves(cls, roles: tuple[Role, ...]) -> tuple[Role, ...]:
        if not roles or (Role.CAPTURE in roles and Role.STORE not in roles):
            raise ValueError("a worker that captures must also store: give capture,store")
        return roles

    @property
    def is_at_home(self) -> bool:
        """Whether `data_dir` is the data folder, where jobs are planned and finished."""
        return not AT_HOME.isdisjoint(self.roles)

    def database(self) -> str:
        """Return the store's URL."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite:///{self.data_dir.resolve() / 'quarry.db'}"

    def narrowed(self, grants: Grants | None) -> Self:
        """Return these settings with only the folders and Hub namespaces that a key allows; null: all."""
        if grants is None or grants.is_admin:
            return self
        namespaces = tuple(name for name in grants.hub_namespaces if self.uses_token_in(name))
        changes = {
            "source_roots": _inside(grants.source_roots, self.source_roots),
            "model_roots": _inside(grants.model_roots, self.model_roots),
            "hub_namespaces": self.hub_namespaces if EVERY_NAMESPACE in grants.hub_namespaces else namespaces,
        }
        return self.model_copy(update=changes)

    def uses_token_in(self, namespace: str) -> bool:
        """Say whether the Hub token is used for the repositories of a user or an organization."""
        names = self.hub_namespaces
        return names is None or EVERY_NAMESPACE in names or namespace in names

    def reading_token(self, repo_id: str) -> str | Literal[False] | None:
        """Return the token that a repository is read with; False: none, not even one of the environment.

        Raises HubDenied.
        """
        return self.token() if self.uses_token_in(repo_id.rpartition("/")[0]) else False

    def token(self) -> str | None:
        """Return the Hub token now in force, or none. Raises HubDenied, which never quotes it."""
        if self.hub_token_file is None:
            name, given = "QUARRY_HUB_TOKEN", self.hub_token.get_secret_value() if self.hub_token else ""
        else:
            name = "QUARRY_HUB_TOKEN_FILE"
            try:
                given = self.hub_token_file.read_text(encoding="latin-1")
            except OSError as error:
                detail = f"the Hub token's file cannot be read: {error.strerror}"
                raise HubDenied(detail, field=name, cure="name a file that this user can read") from error
        token = given.strip()
        if re.fullmatch(r"[!-~]*", token) is None:
            detail = "the Hub token is not one word of printable ASCII characters, so it is not sent"
            raise HubDenied(detail, field=name, cure="give the token alone, on one line")
        return token or None

    def with_secrets(self) -> bytes:
        """Return everything as JSON, secrets in plain text: to be handed to a child, and never to a log."""
        secrets = {name: value.get_secret_value() for name, value in self if isinstance(value, SecretStr)}
        return to_json(dict(self) | secrets)

    def without_secrets(self) -> Self:
        """Return these settings as others may see them."""
        return self.model_copy(update=dict.fromkeys(_SECRETS))

    def with_secrets_of(self, other: Self) -> Self:
        """Return these settings with the secrets of others, where they have some."""
        own = {name: value for name in _SECRETS if (value := getattr(other, name)) is not None}
        return self.model_copy(update=own)

    def of_worker(self, number: int) -> Self:
        """Return the settings of one of a node's workers, counted from 0: each has a port of its own."""
        port = self.worker_metrics_port
        return self if port is None else self.model_copy(update={"worker_metrics_port": port + number})

    def writers(self) -> int:
        """Return how many threads each rank writes with."""
        if self.writer_threads is not None:
            return self.writer_threads
        share = len(os.sched_getaffinity(0)) // self.tensor_parallel_size
        return max(2, min(8, share // 2))

    @property
    def work_root(self) -> Path:
        """Plans and attempts, by job; see `schemas.names`."""
        return self.data_dir / "work"

    @property
    def spool_root(self) -> Path:
        """Posted samples, by the number of their schedule. On one filesystem with the work root."""
        return self.data_dir / "spool"

    def spool(self, schedule: int) -> Path:
        """Return the folder of samples that were posted to a schedule and wait for its next job."""
        return self.spool_root / str(schedule)

    def dataset_dir(self, job_id: str) -> Path:
        """Return the folder that holds a job's finished dataset, in the layout of the Hub repository."""
        return self.out_dir if self.out_dir is not None else self.data_dir / "jobs" / job_id


_SECRETS = tuple(
    name for name, field in Settings.model_fields.items() if field.annotation == SecretStr | None
)


def load_settings(**options: Any) -> Settings:  # noqa: ANN401 - a value of any setting
    """Return the settings of the environment; an option that was given wins.

    What is secret is taken out of the environment, which every child would inherit.

    Raises:
        OptionRefused: naming the first setting that cannot be used.
    """
    try:
        settings = Settings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0])
        log_to_stderr()
        raise OptionRefused(
            first["msg"], field=name, cure=f"fix the option or QUARRY_{name.upper()}"
        ) from error
    except SettingsError as error:
        log_to_stderr()
        raise OptionRefused(str(error), cure="lists and objects in QUARRY_ variables are JSON") from error
    secret = [f"QUARRY_{name.upper()}" for name in _SECRETS]
    for name in [name for name in os.environ if name.upper() in secret]:
        del os.environ[name]
    return settings


def _inside(allowed: Iterable[str], roots: Iterable[Path]) -> tuple[Path, ...]:
    """Return the folders of `allowed` that lie inside one of `roots`, links followed."""
    real = [root.resolve() for root in roots]
    folders = [Path(folder).resolve() for folder in allowed]
    return tuple(folder for folder in folders if any(folder.is_relative_to(root) for root in real))
