"""Stores captured units in their job's repository early, so that little is left to send after the last unit.

No manifest or card lists them before publishing, which verifies every file at its end. Shards that are not
kept here are removed once the repository has them.
"""

import socket
import time
from collections.abc import Callable
from functools import partial

from service.artifacts.folder_limit import check_folder
from service.artifacts.repository import BRANCH, Patience, Repository
from service.capture.attempt_files import move_into_dataset, remove_attempt, remove_paths, sealed_files
from service.errors import HubLimited, OptionRefused, WriteFailed, writing
from service.host import host_of
from service.publish.card import BegunJob
from service.publish.extras import write_final_norm
from service.publish.others import OtherJobs
from service.publish.pushed_to import pushed_to
from service.publish.upload import Uploads
from service.settings import Settings
from service.store import HOME, Store, StoreLease, UnitFiles, commits, jobs, storing
from service.work.keeper import Kept
from service.work.meters import EVICTED, STORED
from service.work.runner import LoopContext, run_next

TURN_S = 1.0
"""Time between two checks of the lease while waiting for the repository's next commit."""


def run_storing(context: LoopContext, *, patience: Patience | None = None) -> bool:
    """Store units of a job that were captured on this host, if a storing is due; return whether one was.

    An error is recorded as an event of the job and the storing is retried while capture continues. An error
    that would fail the publication fails the job now.
    """
    store, settings = context.store, context.settings

    def work(lease: StoreLease, kept: Kept) -> None:
        with writing("the captured units"):
            _store(store, settings, lease, kept.confirm, patience)

    def take() -> StoreLease | None:
        return storing.lease(store, context.owner, settings.lease_s, host_of(store, settings))

    return run_next(context, take, work, settings.publish_attempts)


def _store(
    store: Store, settings: Settings, lease: StoreLease, check: Callable[[], None], patience: Patience | None
) -> None:
    """Store the units of a lease. Raises what `push.JobPush.run` raises, and WriteFailed."""
    request = store.read(jobs.request, lease.job_id)
    assert request.hub is not None, "only a job that is pushed has such a task"  # noqa: S101
    hub = Repository(pushed_to(store, lease.job_id, lease.identity, request.hub), settings, patience)
    is_home = lease.item == HOME
    made = store.read(commits.waiting, lease.job_id, lease.item, storing.FULL_FILES)
    # The planner's host may not know how many ranks the engines have.
    check_folder(store.read(commits.num_shards, lease.job_id))
    dataset, elsewhere = settings.dataset_dir(lease.job_id), {}
    if not is_home:  # scratch, which only this host reads
        dataset = settings.work_root / lease.job_id
        elsewhere = {path: file for unit in made for path, file in sealed_files(settings, unit).items()}
        if lost := [path for path, file in elsewhere.items() if not file.is_file()]:
            # Not the job's fault: the disk was emptied, or a clone of this machine has its host id and the
            # file.
            cure = "restore it, or have it captured again: `quarry workers forget` with the host's id"
            raise WriteFailed(f"{lost[0]} is no longer on {socket.gethostname()}", cure=cure)
    uploads = Uploads(hub, dataset, check, elsewhere)
    others = OtherJobs(hub, uploads, lease.job_id)
    hub.ensure()
    if is_home:
        for unit in made:
            move_into_dataset(settings, unit)
    norm = store.read(commits.final_norm, lease.job_id)
    # A job that cannot be merged is refused before a byte is sent.
    begun = BegunJob(lease.job_id, lease.provenance, hub.target.config_name)
    others.merged(begun, write_final_norm(dataset, norm, f"store-{lease.epoch}"), BRANCH)
    check()
    files = [entry for unit in made for entry in unit.files]
    if missing := uploads.missing(files):
        uploads.send(missing)  # needs no turn: every host has its own connection to the Hub
        _take_turn(store, lease, hub.target.repo_id, check)
    hub.patience.retry(partial(_commit, uploads, others, made), long=True)
    large = uploads.read_back(files)
    going = [entry for unit in made if not request.storage.keep_local for entry in unit.shards]
    if small := [entry.path for entry in (going if is_home else files) if entry.path not in large]:
        detail = f"{hub.target.repo_id} keeps {small[0]} without its sha256, so it cannot leave this machine"
        cure = "let its .gitattributes have `*.parquet filter=lfs diff=lfs merge=lfs -text`"
        raise OptionRefused(detail, field="hub.repo_id", cure=cure)
    store.write(storing.stored, lease, [unit.attempt_id.unit for unit in made])
    for unit in made:
        num_bytes = sum(entry.bytes for entry in unit.shards)
        STORED.add(units=1, bytes=num_bytes)
        if not is_home:
            remove_attempt(settings, unit.attempt_id)
        if not request.storage.keep_local:
            remove_paths(settings, lease.job_id, [entry.path for entry in unit.shards])
        if not (is_home and request.storage.keep_local):
            EVICTED.add(bytes=num_bytes)


def _take_turn(store: Store, lease: StoreLease, repo_id: str, check: Callable[[], None]) -> None:
    """Wait until a job may commit to its repository. Raises HubLimited if the Hub's rate limit is longer."""
    while wait_s := store.write(storing.take_turn, lease):
        if wait_s > storing.APART.total_seconds():
            limited = HubLimited(f"{repo_id} takes no commit for {wait_s:.0f} s")
            limited.wait_s = wait_s
            raise limited
        check()
        time.sleep(min(wait_s, TURN_S))


def _commit(uploads: Uploads, others: OtherJobs, made: list[UnitFiles]) -> None:
    look = partial(others.refuse_another_run, [entry for unit in made for entry in unit.shards])
    look(BRANCH)
    if missing := uploads.missing([entry for unit in made for entry in unit.files]):
        uploads.commit(missing, f"Add units of {made[0].attempt_id.job_id}", look)
