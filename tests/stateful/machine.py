"""Any sequence of what users and fate do to a service, as rules that hypothesis puts in an order."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from service.control import scheduling
from service.control.deletion import delete_job
from service.errors import STORE_AWAY, DiskFull, StoreUnavailable
from service.store import Store
from tests.stateful.engine import FAULT
from tests.stateful.files import meanwhile
from tests.stateful.oracle import NO_SPACE, NUM_CHECKPOINTS, OWNERS, Checkpoints
from tests.stateful.play import REFUSALS, Play
from tests.stateful.world import MODELS

HOUR_S = 3600.0
PICKS = st.integers(0, 3)
NUMBERS = st.frozensets(st.integers(0, 9), min_size=1, max_size=6)
OWNER = st.sampled_from([None, *OWNERS])
MODEL = st.sampled_from([MODELS[0], *MODELS])
CHECKPOINT = st.integers(0, NUM_CHECKPOINTS - 1)
CANARY = st.sampled_from(["skip", "run"])
OVERLAP = st.sampled_from(["queue", "replace", "skip"])
ROLES = st.sampled_from(["plan", "publish", "sweep", "slots", "retention"])
ANY_ROLE = ROLES | st.just("capture")
WORK = st.just("all") | ANY_ROLE
AT = st.integers(1, 12)
FILE_AT = st.integers(1, 12) | st.integers(1, 130)
AWAY, FULL = StoreUnavailable("away"), DiskFull("it cannot grow")

Act = Callable[[Play], None]
ACTS = st.one_of(
    st.builds(lambda pick, gone: partial(Play.delete, number=pick, with_dataset=gone), PICKS, st.booleans()),
    st.builds(
        lambda pick, verb: partial(Play.ask, number=pick, verb=verb),
        PICKS,
        st.sampled_from(["cancel", "pause", "resume"]),
    ),
    st.builds(lambda pick: partial(Play.remove_schedule, number=pick), PICKS),
    st.builds(
        lambda name, number: partial(Play.overwrite_model, name=name, checkpoint=number), MODEL, CHECKPOINT
    ),
    st.builds(
        lambda owner, numbers: partial(Play.overwrite_source, owner=owner, numbers=numbers), OWNER, NUMBERS
    ),
    st.builds(lambda pick, numbers: partial(Play.post, number=pick, numbers=numbers), PICKS, NUMBERS),
    st.builds(lambda hours: partial(pass_time, hours=hours), st.integers(1, 3)),
    st.just(Play.forget),
)
"""What happens while something else goes on."""


ON_DISK = st.one_of(
    st.builds(lambda role: partial(work, role=role), WORK),
    st.builds(lambda pick, gone: partial(Play.delete, number=pick, with_dataset=gone), PICKS, st.booleans()),
)
"""What meets a full disk."""


def work(play: Play, role: str) -> None:
    """Let a role, or the worker, do what there is; or one after the other."""
    if role == "all":
        for one in ("slots", "plan", "capture", "publish", "sweep"):
            work(play, one)
            play.notice_slots()
    elif role == "capture":
        play.service.worker.work(play.store)
    else:
        play.service.run(play.service.roles()[role])


def pass_time(play: Play, hours: int) -> None:
    play.service.clock.advance(hours * HOUR_S)


with_a_job = precondition(lambda machine: machine.play.pick(0) is not None)
with_a_schedule = precondition(lambda machine: machine.play.pick_schedule(0) is not None)
with_something = precondition(
    lambda machine: machine.play.pick(0) is not None or machine.play.pick_schedule(0) is not None
)


class Machine(RuleBasedStateMachine):
    """One service, whose database `lend` gives."""

    lend: ClassVar[Callable[[Path], AbstractContextManager[str]]]
    checkpoints: ClassVar[Checkpoints]
    steps: ClassVar[int] = 0
    sequences: ClassVar[int] = 0
    reached: ClassVar[Counter[str]] = Counter()
    """How often something happened that a rule may or may not bring about."""

    def __init__(self) -> None:
        super().__init__()
        type(self).sequences += 1
        self.root = Path(tempfile.mkdtemp(prefix="quarry-stateful-"))
        self._lent = type(self).lend(self.root)
        self.play = Play(self.root, self._lent.__enter__(), self.checkpoints)

    def teardown(self) -> None:
        try:
            self.play.end()
        finally:
            type(self).reached.update(self.play.reached)
            self.play.close()
            self._lent.__exit__(None, None, None)
            shutil.rmtree(self.root, ignore_errors=True)

    def _step(self) -> None:
        type(self).steps += 1

    # Users.

    @rule(
        owner=OWNER,
        key=st.sampled_from(["new", "new", "deleted", "taken"]),
        model=MODEL,
        layers=st.sampled_from([(1,), (1,), (0, 1)]),
        numbers=NUMBERS | st.just(frozenset()),
        canary=CANARY,
    )
    def submit(
        self,
        owner: str | None,
        key: str,
        model: str,
        layers: tuple[int, ...],
        numbers: frozenset[int],
        canary: str,
    ) -> None:
        self._step()
        owner, key = self.play.choose_key(key, owner)
        self.play.submit(owner, key, model, layers, numbers, canary=canary)

    @with_a_job
    @rule(pick=PICKS)
    def submit_again(self, pick: int) -> None:
        self._step()
        self.play.submit_again(pick)

    @with_a_job
    @rule(pick=PICKS, with_dataset=st.booleans())
    def delete(self, pick: int, with_dataset: bool) -> None:
        self._step()
        self.play.delete(pick, with_dataset=with_dataset)

    @with_a_job
    @rule(pick=PICKS, verb=st.sampled_from(["cancel", "pause", "resume", "resume"]))
    def ask(self, pick: int, verb: str) -> None:
        self._step()
        self.play.ask(pick, verb)

    @with_a_job
    @rule(pick=PICKS, priority=st.integers(-1, 1))
    def set_priority(self, pick: int, priority: int) -> None:
        self._step()
        self.play.set_priority(pick, priority)

    @rule(name=MODEL, checkpoint=CHECKPOINT, renamed=st.booleans())
    def overwrite_model(self, name: str, checkpoint: int, renamed: bool) -> None:
        self._step()
        self.play.overwrite_model(name, checkpoint, renamed=renamed)

    @rule(owner=OWNER, numbers=NUMBERS)
    def overwrite_source(self, owner: str | None, numbers: frozenset[int]) -> None:
        self._step()
        self.play.overwrite_source(owner, numbers)

    @rule(
        owner=OWNER,
        name=st.sampled_from(["nightly", "daily"]),
        kind=st.sampled_from(["posted", "posted", "file"]),
        model=MODEL,
        rules=st.fixed_dictionaries({"takes_all": st.booleans(), "overlap": OVERLAP, "canary": CANARY}),
    )
    def add_schedule(
        self, owner: str | None, name: str, kind: str, model: str, rules: dict[str, Any]
    ) -> None:
        self._step()
        self.play.add_schedule(owner, name, kind, model, **rules)

    @with_a_schedule
    @rule(
        pick=PICKS,
        change=st.sampled_from([{"paused": True}, {"paused": False}])
        | st.builds(lambda overlap: {"overlap": overlap}, OVERLAP)
        | st.just({"changed_recipe": "begin_anew"}),
    )
    def change_schedule(self, pick: int, change: dict[str, object]) -> None:
        self._step()
        self.play.change_schedule(pick, change)

    @with_a_schedule
    @rule(pick=PICKS)
    def remove_schedule(self, pick: int) -> None:
        self._step()
        self.play.remove_schedule(pick)

    @with_a_schedule
    @rule(pick=PICKS, numbers=NUMBERS)
    def post(self, pick: int, numbers: frozenset[int]) -> None:
        self._step()
        self.play.post(pick, numbers)

    @with_a_schedule
    @rule(pick=PICKS)
    def run_now(self, pick: int) -> None:
        self._step()
        self.play.run_now(pick)

    # Work.

    @with_something
    @rule(role=ROLES)
    def work(self, role: str) -> None:
        self._step()
        work(self.play, role)
        self.play.notice_slots()
        self.play.after_a_deletion()

    @with_a_job
    @rule(at=st.none() | AT)
    def capture(self, at: int | None) -> None:
        self._step()
        self.play.service.worker.work(self.play.store, at)

    @with_something
    @rule()
    def settle(self) -> None:
        self._step()
        self.play.settle()

    @with_something
    @rule(hours=st.sampled_from([1, 1, 2]))
    def spend_a_night(self, hours: int) -> None:
        self._step()
        pass_time(self.play, hours)
        self.play.settle()

    @with_a_job
    @rule(in_order=st.booleans())
    def end_worker(self, in_order: bool) -> None:
        self._step()
        self.play.service.end_worker(in_order=in_order)

    # Fate.

    @with_something
    @rule(hours=st.sampled_from([1, 1, 1, 2, 24, -2]))
    def pass_time(self, hours: int) -> None:
        self._step()
        pass_time(self.play, hours)

    @with_something
    @rule(role=ROLES, at=AT, act=ACTS)
    def meanwhile(self, role: str, at: int, act: Act) -> None:
        """Something is done in the middle of a role's work."""
        self._step()
        self.play.service.run(self.play.service.roles()[role], at, partial(act, self.play))
        self.play.notice_slots()

    @with_a_job
    @rule(at=AT, act=ACTS)
    def meanwhile_in_capture(self, at: int, act: Act) -> None:
        self._step()
        self.play.service.worker.work(self.play.store, at, partial(act, self.play))

    @with_a_job
    @rule(name=MODEL, checkpoint=CHECKPOINT)
    def overwrite_model_at_a_start(self, name: str, checkpoint: int) -> None:
        """A checkpoint is overwritten after it was looked at, before the next engine loads it."""
        self._step()
        FAULT.before_load = partial(self.play.overwrite_model, name, checkpoint)
        work(self.play, "plan")
        work(self.play, "capture")
        self.play.notice_fault()

    @with_something
    @rule(role=ROLES, at=AT, error=st.sampled_from([AWAY, FULL]))
    def database_fails(self, role: str, at: int, error: Exception) -> None:
        """The database is away, or cannot grow, in the middle of a role's work."""
        self._step()

        def fail() -> None:
            raise error

        if error is FULL:
            self.play.excuse_all(NO_SPACE)
        with suppress(*STORE_AWAY):
            self.play.service.run(self.play.service.roles()[role], at, fail)
        self.play.notice_slots()

    @with_a_job
    @rule(at=AT)
    def database_cannot_grow_in_capture(self, at: int) -> None:
        self._step()

        def fail() -> None:
            raise FULL

        self.play.excuse_all(NO_SPACE)
        self.play.service.worker.work(self.play.store, at, fail)

    @with_something
    @rule(role=WORK, at=FILE_AT, act=ACTS)
    def meanwhile_at_a_file(self, role: str, at: int, act: Act) -> None:
        """Something is done between two file calls of a role, which may read a model or a source."""
        self._step()
        with meanwhile(self.root, at, partial(act, self.play)) as calls:
            work(self.play, role)
        self.play.reached["acts between file calls"] += calls.acted
        self.play.notice_slots()
        self.play.after_a_deletion()

    @with_something
    @rule(act=ON_DISK, at=FILE_AT, stays=st.booleans())
    def disk_is_full(self, act: Act, at: int, stays: bool) -> None:
        """The data folder's disk is full at one write call, or from then on until something else is done."""
        self._step()
        self.play.meet_full_disk(act, at, stays=stays)

    @with_a_schedule
    @rule(pick=PICKS, numbers=NUMBERS, at=st.integers(1, 8), stays=st.booleans())
    def post_to_a_full_disk(self, pick: int, numbers: frozenset[int], at: int, stays: bool) -> None:
        """Whoever is refused posts the same again."""
        self._step()
        post = partial(Play.post, number=pick, numbers=numbers)
        self.play.meet_full_disk(post, at, stays=stays)
        post(self.play)

    @with_a_job
    @rule()
    def forget(self) -> None:
        self._step()
        self.play.forget()

    @with_a_job
    @rule()
    def free_space(self) -> None:
        self._step()
        self.play.free_space()

    @with_something
    @rule(role=ANY_ROLE, at=AT, committed=st.booleans())
    def process_dies(self, role: str, at: int, committed: bool) -> None:
        """A process with that role is killed in the middle of its work."""
        self._step()
        service = self.play.service
        service.die(service.roles().get(role, service.capture_elsewhere), at, committed=committed)
        self.play.notice_slots()

    @with_a_job
    @rule(pick=PICKS, at=st.integers(1, 4), committed=st.booleans(), with_dataset=st.booleans())
    def deletion_dies(self, pick: int, at: int, committed: bool, with_dataset: bool) -> None:
        self._step()
        record = self.play.pick(pick)
        if record is None:
            return
        self.play.look(record)

        def delete(store: Store) -> None:
            with suppress(*REFUSALS):
                delete_job(store, self.play.service.settings, record.id, with_dataset=with_dataset)

        self.play.service.die(delete, at, committed=committed)
        self.play.after_a_deletion()

    @with_a_schedule
    @rule(pick=PICKS, at=st.integers(1, 3), committed=st.booleans())
    def removal_dies(self, pick: int, at: int, committed: bool) -> None:
        self._step()
        schedule = self.play.pick_schedule(pick)
        if schedule is None:
            return
        self.play.notice_slots()

        def remove(store: Store) -> None:
            scheduling.remove(store, self.play.service.settings, schedule.name)

        self.play.service.die(remove, at, committed=committed)
        self.play.removal_was_cut_off = True
        self.play.after_a_removal()

    @with_a_job
    @rule(rows=st.integers(0, 5), dies=st.booleans())
    def engine_fails(self, rows: int, dies: bool) -> None:
        """The engine dies, or refuses to go on, after some rows of what waits now."""
        self._step()
        self.play.plan_fault(rows, dies=dies)
        self.play.service.worker.work(self.play.store)
        self.play.notice_fault()
