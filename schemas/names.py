"""The only parsers of names that users give, and the only makers of names on disk and on the Hub.

Every name is a function of the plan (job, unit, epoch, rank), never of a clock, a pid or a random number, so
that a step done twice writes the same name. A name that passed here holds no path separator, no dot-dot and
no control character.
"""

import hashlib
import re
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

JOB_ID_PATTERN = r"^j-[0-9a-f]{16}$"
REPO_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$"
CONFIG_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"

MAX_UNITS = 100_000
"""Units of one job: five digits in a shard's name, and under the Hub's 100k files of a repository."""

PLAN_FILE = "plan.parquet"
"""In an attempt's folder: the unit's frozen samples, while the connector opens the attempt."""

MANIFEST_FOLDER = "manifests"
CARD_PATH = "README.md"
JOBS_PATH = "jobs.json"
FINAL_NORM_PATH = "final_norm.safetensors"
"""One a repository: it holds the states of one model."""

PRIVATE_FOLDER = ".quarry"
"""In a dataset's folder while `quarry extract` makes it: the state of its job, and no part of the dataset."""

MAX_RANKS = 64
"""Of one engine: each writes a shard of a unit."""
MAX_FOLDER_FILES = 10_000
"""Files of one folder of a repository: the Hub refuses every commit that would add more."""
MAX_COMMIT_FILES = 100
"""Files of one commit to the Hub, which answers within its minute up to about this many."""


def _repo_id(value: str) -> str:
    """Apply the Hub's rules beyond the pattern: no `--`, no `..`, no trailing `.git` or punctuation."""
    for part in value.split("/"):
        if "--" in part or ".." in part or part.endswith((".git", ".", "-")):
            raise ValueError(
                f"{value!r} is not a Hub repository id: no '--', no '..', no '.git', '.' or '-' at an end"
            )
    return value


JobId = Annotated[str, StringConstraints(pattern=JOB_ID_PATTERN)]
"""`j-` and 16 hex digits."""
RepoId = Annotated[str, StringConstraints(pattern=REPO_ID_PATTERN), AfterValidator(_repo_id)]
"""`namespace/name` of a Hub repository."""
ConfigName = Annotated[str, StringConstraints(pattern=CONFIG_NAME_PATTERN)]
"""A `datasets` configuration's name."""


def job_id_from_content(content: str) -> str:
    """Return the id of a job that is known by its content: the same on any machine."""
    return "j-" + hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def is_job_id(value: str) -> bool:
    """Say whether `value` has the form of a job id."""
    return re.fullmatch(JOB_ID_PATTERN, value) is not None


LabelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]
"""A column of a source that becomes `label_<name>` in an index."""

SCHEDULE_NAME_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}$"
ScheduleName = Annotated[str, StringConstraints(pattern=SCHEDULE_NAME_PATTERN)]
"""Lower-case letters, digits and dashes."""


def is_local_model(model: str) -> bool:
    """Say whether `model` names a folder: by an absolute path, or by one that begins with a dot."""
    return model.startswith(("/", "."))


def shown_model(model: str) -> str:
    """Return how a dataset names its model: a folder by its own name alone, as `./name`."""
    return f"./{PurePosixPath(model).name}" if is_local_model(model) else model


def is_inside(path: str) -> bool:
    """Say whether a path that a dataset names stays inside it. Nothing in a dataset is trusted."""
    parts = PurePosixPath(path)
    return not parts.is_absolute() and ".." not in parts.parts and "\0" not in path


def _checked_job(job_id: str) -> str:
    if not is_job_id(job_id):
        raise ValueError(f"{job_id!r} is not a job id (expected {JOB_ID_PATTERN})")
    return job_id


def _checked_unit(unit: int) -> int:
    if not 0 <= unit < 2 * MAX_UNITS:
        raise ValueError(f"unit {unit} is outside 0..{2 * MAX_UNITS - 1}")
    return unit


def canary_unit(unit: int) -> int:
    """Return the number under which the canary before `unit` is captured: above every unit of a plan."""
    return MAX_UNITS + _checked_unit(unit) % MAX_UNITS


def shard_file(unit: int, rank: int = 0, num_ranks: int = 1) -> str:
    """Return a shard's file name; the rank is named only where several ranks write."""
    suffix = f"-r{rank}" if num_ranks > 1 else ""
    return f"train-{_checked_unit(unit):05d}{suffix}.parquet"


def job_folders(job_id: str) -> tuple[str, str]:
    """Return the folders of a job's shards and of its indexes inside the dataset repository."""
    return f"data/{_checked_job(job_id)}", f"index/{_checked_job(job_id)}"


def shard_path(job_id: str, unit: int, rank: int = 0, num_ranks: int = 1) -> str:
    """Return a shard's path inside the dataset repository."""
    return f"{job_folders(job_id)[0]}/{shard_file(unit, rank, num_ranks)}"


def index_path(job_id: str, unit: int) -> str:
    """Return the path of a unit's light index (ids, lengths, masks) inside the dataset repository."""
    return f"{job_folders(job_id)[1]}/{shard_file(unit)}"


def manifest_path(job_id: str) -> str:
    """Return the path of a job's manifest inside the dataset repository.

    Several jobs may share one repository.
    """
    return f"{MANIFEST_FOLDER}/{_checked_job(job_id)}.json"


def is_manifest(path: str) -> bool:
    """Say whether a path inside the dataset repository is one that a manifest, and nothing else, has."""
    parts = PurePosixPath(path)
    return len(parts.parts) == 2 and parts.parts[0] == MANIFEST_FOLDER and parts.suffix == ".json"


def token_freq_path(job_id: str) -> str:
    """Return the path of a job's counts of supervised tokens inside the dataset repository."""
    return f"token_freq/{_checked_job(job_id)}.parquet"


def frozen_source_path(job_id: str) -> str:
    """Return the path below the work root of what a job's source was when its plan was begun."""
    return f"{_checked_job(job_id)}/source.json"


def posted_path(job_id: str) -> str:
    """Return the folder below the work root of the posted samples that a job took."""
    return f"{_checked_job(job_id)}/posted"


def passed_on_path(job_id: str) -> str:
    """Return the folder below the work root of those that a later run took over, too."""
    return f"{_checked_job(job_id)}/passed-on"


def known_hashes_path(job_id: str) -> str:
    """Return the path below the work root of the keys of what a schedule's job leaves out."""
    return f"{_checked_job(job_id)}/known-keys"


def attempt_dir(job_id: str, unit: int, epoch: int) -> str:
    """Return the folder below the work root that attempt (unit, epoch) alone writes into."""
    if epoch < 1:
        raise ValueError(f"epoch {epoch} is below 1")
    return f"{_checked_job(job_id)}/attempts/{_checked_unit(unit):05d}-{epoch}"
