"""Settings: environment variables with the prefix `QUARRY_`, secrets from files."""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, PrivateAttr, SecretStr, ValidationError, field_validator
from pydantic_core import to_json
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from schemas.keys import EVERY_NAMESPACE, Grants
from schemas.names import MAX_RANKS
from schemas.worker import AT_HOME, Role
from service.environment import PREFIX, Environment, refuse_misspelt
from service.errors import HubDenied, OptionRefused
from service.logs import log_to_stderr

YEAR_S = 31_536_000.0
"""Most of a time that the database adds to its clock: beyond the year 9999 there is no time."""
WAIT_S = 2_000_000.0
"""Most of a time that a process waits for another: the kernel's `poll` takes 2^31 ms at most."""


class Settings(BaseSettings):
    """All settings. One instance is made at start and passed down.

    Nothing reads the environment later. `docs/settings.md` is generated from the fields and their docstrings.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="forbid",
        frozen=True,
        secrets_dir=None,
        env_ignore_empty=True,
        use_attribute_docstrings=True,
    )

    data_dir: Path = Path("quarry-data")
    """Folder of the database, the attempts and the finished datasets, `jobs/<job>/`.

    It must be one file system: files are renamed between its folders.
    """
    out_dir: Path | None = None
    """Set only by `quarry extract --out`, for its one job; unset: each job's is below `data_dir/jobs/`.

    It is refused in the environment: deleting one job would delete the datasets of all.
    """
    database_url: SecretStr | None = None
    """SQLAlchemy URL; unset: SQLite at `data_dir/quarry.db`. PostgreSQL: `postgresql+psycopg://...`.

    Where PostgreSQL's `synchronous_commit` is off (its default is on), it is on for Quarry's sessions: if an
    acknowledged commit is lost, rows are lost.
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
    """Further host names for the API, besides loopback names, `host` and the address that was called."""
    admin_key_file: Path | None = None
    """File that holds the operator's API key, one word of at least 32 characters; read at each use.

    Use it to make further keys: `quarry keys add`. Without it and without keys, the API is served only
    on the loopback interface, to every local caller.
    """
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024)
    """Largest request body. Each object, list and field in it counts as 16 extra bytes."""
    request_timeout_s: float = Field(default=60.0, gt=0)
    """Time in which a caller must send a whole request; also how long it may stop reading the answer."""
    max_connections: int = Field(default=1000, ge=16)
    """Most open connections; beyond it, the one that has been idle longest is closed."""
    event_listeners: int = Field(default=256, ge=1)
    """Most event streams and requests for units per key owner, and of all callers without a key together.

    All of them together take at most half of the connections.
    """
    roles: tuple[Role, ...] = tuple(Role)
    """What workers do, as JSON; also `quarry worker --roles`. `["capture", "store"]` needs no data folder.

    `QUARRY_DATA_DIR` is then local scratch space that holds captured units until they are stored.
    """
    host_lost_s: float = Field(default=1800.0, ge=60.0, le=YEAR_S)
    """Silence after which a machine without the data folder is lost: its unstored units run again."""
    scratch_bytes: int | None = Field(default=None, ge=2**20)
    """Limit for shards that wait for their upload (of jobs with `storage.keep_local: false`; of all jobs on
    machines without the data folder) or for their consumers (of jobs with `storage.retention: consumed`).

    Unset: no limit. At the limit, capture of such jobs pauses until some shards have left.
    """
    min_free_bytes: int = Field(default=2**30, ge=0)
    """Free space in the data folder below which no new job, schedule or sample is accepted."""

    webhook_secret_file: Path | None = None
    """File of at least 32 random characters, from which the secrets that sign webhooks are derived.

    Without it, jobs with a webhook are refused.
    """
    webhook_hosts: tuple[str, ...] = ()
    """Webhook hosts whose addresses may be private, as JSON. Others are called only at public addresses."""

    hub_endpoint: str | None = None
    """Base URL of the Hub; unset: that of `HF_ENDPOINT`, or the public one."""
    hub_token: SecretStr | None = None
    """The Hub token. A file is safer. Without one, what is read is read with the token of `HF_TOKEN` or
    `hf auth login`, if there is one, and pushes are refused."""
    hub_namespaces: tuple[str, ...] | None = None
    """Hub users and organizations that the token is used for, as JSON; unset or `["*"]`: all.

    Jobs push only to these. From others they read only what is public.
    """
    hub_token_file: Path | None = None
    """File that holds the Hub token; read at each use, so it can be replaced while the service runs."""

    engine: str = "service.capture.vllm_engine:VllmEngine"
    """Import path of the engine class."""
    engine_options: dict[str, JsonValue] = {}
    """Further keyword arguments of vLLM's engine, as JSON. Options that would corrupt rows are refused."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=MAX_RANKS)
    """GPUs that the model is split over."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of the GPU's memory that the engine takes; unset: vLLM's default."""
    cpu_kv_cache_gib: int = Field(default=2, ge=1)
    """KV cache in GiB with vLLM's CPU build, which would otherwise take 9/10 of the machine's memory."""
    engine_start_timeout_s: float = Field(default=1800.0, gt=0)
    """How long the engine may take to start."""
    engine_silence_s: float = Field(default=3600.0, gt=0)
    """How long an engine may answer no request before it is replaced; must be longer than an answer takes."""
    pool_bytes: int = Field(default=1 * 2**30, ge=2**16)
    """Host memory that a connector worker drains states through; at least one sample of full length."""
    writer_threads: int | None = Field(default=None, ge=1, le=64)
    """Threads of each rank that write rows; as many more encode them.

    Unset: half of the rank's share of the cores, 2 to 8.
    """

    lease_s: float = Field(default=60.0, ge=1.0, le=YEAR_S)
    """How long a silent worker keeps its lease on a unit, plan or repository."""
    keep_jobs_days: float | None = Field(default=None, ge=0.0, le=36_500.0)
    """Days for which a job is kept after it ends; unset: forever. What it pushed stays on the Hub."""
    delete_old_datasets: bool = False
    """When `keep_jobs_days` are over, delete the job's dataset in the data folder along with the job.
    Otherwise a job of a key with `max_bytes` is kept as long as its dataset, which counts toward it."""
    planners: int = Field(default=2, ge=1, le=16)
    """Jobs that one worker plans at once, each in its own child process."""
    publishers: int = Field(default=3, ge=1, le=64)
    """Datasets that one worker publishes at once; a repository has one publisher at a time."""
    poll_s: float = Field(default=0.5, gt=0, le=WAIT_S)
    """How often an idle worker looks for work."""
    unit_attempts: int = Field(default=3, ge=1, le=100)
    """Attempts at a unit before its job fails, and at a plan before it is blocked; if ten workers die
    silently on one unit, or ten planners on a plan, the job is blocked.

    The death of an engine does not count as an attempt.
    """
    engine_rest_s: float = Field(default=3600.0, gt=0, le=YEAR_S)
    """How long a worker takes no units of a model on which its engine died three times in a row."""
    unit_max_samples: int = Field(default=4096, ge=1, le=65_536)
    """Most samples in a unit."""
    units_in_flight: int = Field(default=2, ge=1, le=16)
    """Units whose rows one worker has in its engine at once, so that it does not idle between units."""
    units_in_proof: int = Field(default=4, ge=0, le=64)
    """Further units that may wait for receipt, proof and commit; one core proves about 1 GB/s."""
    in_flight_tokens: int = Field(default=65_536, ge=1)
    """Most tokens that one worker has in its engine at once. Several batches keep the engine full."""
    in_flight_requests: int = Field(default=512, ge=1)
    """Most requests that one worker has in its engine at once."""
    plan_row_cpu_s: float = Field(default=60.0, gt=0, le=WAIT_S)
    """CPU time that planning one row, or loading the tokenizer, may take before the job fails."""
    plan_silence_s: float = Field(default=600.0, gt=0, le=WAIT_S)
    """How long one row may take without using CPU time, for example on a disk that does not answer; in
    `quarry verify`, how long one row, or 1 MiB of a file, may take in total."""
    plan_memory_bytes: int = Field(default=2 * 2**30, ge=2**24)
    """Memory that the tokenizer, the template and the current row may take beyond the libraries; also the
    limit for the card and the job list of a repository that is pushed to."""
    estimates_at_once: int = Field(default=2, ge=1, le=64)
    """Estimates that the API runs at once, at most half of them for one key owner; others get a 429."""
    worker_metrics_port: int | None = Field(default=None, ge=1, le=65_535)
    """Port of a worker's own `/metrics`, which needs no key; each further one of `--workers` adds 1.

    vLLM then keeps its statistics, which are served there too. Unset: no endpoint.
    """
    worker_metrics_host: str = "127.0.0.1"
    """Address that workers serve `/metrics` on; `0.0.0.0` for a Prometheus on another machine."""
    log_format: Literal["text", "json"] = "text"
    """Log format of services and workers; `json`: one object per line, with job, unit and epoch."""
    receipt_timeout_s: float = Field(default=600.0, gt=0)
    """How long writing the last rows of a unit may take after the engine has answered all of them, and the
    rows ahead of them have left its cache; until then, how long no row may leave it.
    """
    drain_s: float = Field(default=120.0, ge=0)
    """How long units in the engine may take to finish after SIGTERM before they are given back."""
    read_memory_bytes: int = Field(default=8 * 2**30, ge=2**26)
    """Memory that `quarry verify` may take beyond its libraries to read a dataset, which is not trusted."""
    publish_attempts: int = Field(default=24, ge=1)
    """Push attempts without a new commit before the job is blocked; each lasts up to 15 minutes. A plan or a
    unit that cannot reach the Hub gets as many, apart from `QUARRY_UNIT_ATTEMPTS`."""
    canary_max_bytes: int | None = Field(default=None, ge=1)
    """Memory of the canary's reference for its largest layer; unset: half of the available memory."""

    _is_narrowed: bool = PrivateAttr(default=False)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_: object,
        **__: object,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read what is given, then the environment."""
        return init_settings, Environment(settings_cls)

    @field_validator("roles")
    @classmethod
    def _what_is_captured_leaves(cls, roles: tuple[Role, ...]) -> tuple[Role, ...]:
        if not roles or (Role.CAPTURE in roles and Role.STORE not in roles):
            raise ValueError("a worker that captures must also store: give capture,store")
        return roles

    @field_validator("source_roots", "model_roots", mode="before")
    @classmethod
    def _names_its_folders(cls, roots: object) -> object:
        if isinstance(roots, list) and "" in roots:  # as of a variable that is unset
            raise ValueError("a folder's name is empty, which would be the current folder")
        return roots

    @property
    def is_at_home(self) -> bool:
        """Whether `data_dir` is the data folder, where jobs are planned and finished."""
        return not AT_HOME.isdisjoint(self.roles)

    def database(self) -> str:
        """Return the store's URL."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        path = str(self.data_dir.resolve() / "quarry.db")
        return "sqlite:///" + path.replace("%", "%25").replace("?", "%3F")

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
        narrowed = self.model_copy(update=changes)
        narrowed._is_narrowed = True
        return narrowed

    @property
    def closed_folder(self) -> Path | None:
        """The data folder, which holds what every owner sent, where sources are read for a single owner."""
        return self.data_dir.resolve() if self._is_narrowed else None

    def uses_token_in(self, namespace: str) -> bool:
        """Say whether the Hub token is used for the repositories of a user or an organization."""
        names = self.hub_namespaces
        return names is None or EVERY_NAMESPACE in names or namespace in names

    def check_push(self, repo_id: str) -> None:
        """Raise HubDenied if the Hub token may not be used to push to a repository."""
        namespace = repo_id.split("/")[0]
        if not self.uses_token_in(namespace):
            cure = "use a key with this namespace, or another repository"
            raise HubDenied(f"nothing may be pushed to {namespace}", field="hub.repo_id", cure=cure)

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
        """Return everything as JSON, secrets in plain text: for a child process, never for a log."""
        secrets = {name: value.get_secret_value() for name, value in self if isinstance(value, SecretStr)}
        return to_json(dict(self) | secrets)

    def without_secrets(self) -> Self:
        """Return these settings as others may see them."""
        return self.model_copy(update=dict.fromkeys(_SECRETS))

    def with_secrets_of(self, other: Self) -> Self:
        """Return these settings with the secrets that `other` has."""
        own = {name: value for name in _SECRETS if (value := getattr(other, name)) is not None}
        return self.model_copy(update=own)

    def of_worker(self, number: int) -> Self:
        """Return the settings of one of a node's workers, counted from 0: each has its own metrics port."""
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
        """Posted samples, by the number of their schedule; on the same file system as the work root."""
        return self.data_dir / "spool"

    def spool(self, schedule: int) -> Path:
        """Return the folder of samples posted to a schedule that wait for its next job."""
        return self.spool_root / str(schedule)

    def dataset_dir(self, job_id: str) -> Path:
        """Return the folder that holds a job's finished dataset, in the layout of the Hub repository."""
        return self.out_dir if self.out_dir is not None else self.data_dir / "jobs" / job_id


_SECRETS = tuple(
    name for name, field in Settings.model_fields.items() if field.annotation == SecretStr | None
)


def load_settings(**options: Any) -> Settings:  # noqa: ANN401 - a value of any setting
    """Return the settings of the environment; given options override them.

    Secrets are removed from the environment, which every child would inherit.

    Raises:
        OptionRefused: names the first setting that cannot be used.
    """
    try:
        settings = Settings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0])
        log_to_stderr()
        raise OptionRefused(
            first["msg"], field=name, cure=f"fix the option or {PREFIX}{name.upper()}"
        ) from error
    except SettingsError as error:
        log_to_stderr()
        named = re.search(r'field "(\w+)"', str(error))  # its only place
        detail, field = ("its value is not JSON", named[1]) if named else (str(error), None)
        cure = """lists and objects in QUARRY_ variables are JSON, such as '["/data"]'"""
        raise OptionRefused(detail, field=field, cure=cure) from error
    refuse_misspelt(Settings.model_fields)
    if settings.out_dir is not None:
        cure = "unset QUARRY_OUT_DIR; `quarry extract --out` names the folder of one job"
        raise OptionRefused("the jobs of a service cannot share a folder", field="out_dir", cure=cure)
    secret = [f"{PREFIX}{name.upper()}" for name in _SECRETS]
    for name in [name for name in os.environ if name.upper() in secret]:
        del os.environ[name]
    return settings


def _inside(allowed: Iterable[str], roots: Iterable[Path]) -> tuple[Path, ...]:
    """Return the folders of `allowed` that lie inside one of `roots`, links followed; a loop is none."""
    real, folders = _resolved(roots), _resolved(map(Path, allowed))
    return tuple(folder for folder in folders if any(folder.is_relative_to(root) for root in real))


def _resolved(folders: Iterable[Path]) -> list[Path]:
    real: list[Path] = []
    for folder in folders:
        with suppress(RuntimeError):  # of a loop, before Python 3.13
            real.append(folder.resolve())
    return real
