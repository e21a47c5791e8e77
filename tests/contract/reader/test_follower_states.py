"""The state of a follower: it goes on with the next row, of the same job, in the same order."""

from itertools import islice
from pathlib import Path

import pytest

from schemas.request import Storage
from service.reader import Eagle3, QuarryStream, ReaderError
from tests.support.api import api_settings, serving, stored
from tests.support.finished_job import JOB, OTHER_JOB, a_request, run_to_publishing
from tests.support.followed import EVERY, ROWS, UNITS, Followed, ids


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 4, 100])
@pytest.mark.parametrize("even", [True, False])
def test_a_state_goes_on_with_the_next_row(followed: Followed, window: int, even: bool) -> None:
    """Whatever row a trainer was killed after, and however far the job was then."""
    followed.capture(UNITS)
    followed.complete()
    for rank in range(2):
        changes = {"rank": rank, "world_size": 2, "window": window, "even": even}
        whole = ids(followed.follow(**changes))
        for stop in range(len(whole) + 2):
            rows = iter(stream := followed.follow(**changes))
            before = ids(islice(rows, stop))  # the last time up to the end, and not only to the last row
            resumed = followed.follow(**changes)
            resumed.load_state_dict(stream.state_dict())
            assert before + ids(resumed) == whole
        assert ids(resumed) == whole  # the next epoch


def test_a_state_of_another_number_of_ranks_is_refused(followed: Followed) -> None:
    followed.capture()
    rows = iter(stream := followed.follow())
    next(rows)
    other = followed.follow(rank=1, world_size=2)
    other.load_state_dict(stream.state_dict())
    with pytest.raises(ReaderError, match="world_size 1, not 2"):
        next(iter(other))


def test_a_state_of_another_job_or_of_another_order_is_refused(followed: Followed) -> None:
    """Its places are of another order of units: rows would be left out, or come twice."""
    followed.capture(UNITS)
    followed.complete()
    by_folder = QuarryStream.follow(followed.dataset, JOB, rank=0, world_size=1)
    for stream, other, said in (
        (followed.follow(), by_folder, "order commits, not plan"),
        (by_folder, followed.follow(), "order plan, not commits"),
        (followed.follow(), QuarryStream.follow(followed.url, OTHER_JOB, rank=0, world_size=1), "job"),
    ):
        next(iter(stream))
        with pytest.raises(ReaderError, match=said):
            other.load_state_dict(stream.state_dict())
    with pytest.raises(ReaderError, match="no state of a follower"):
        by_folder.load_state_dict({"epoch": 0, "row": 3})


def test_a_unit_whose_rows_were_all_taken_is_needed_no_more(followed: Followed) -> None:
    """Also before the next one comes, for which capture may wait."""
    followed.capture()
    rows = iter(stream := followed.follow())
    ids(islice(rows, ROWS - 1))
    assert stream.state_dict()["after"] == -1
    next(rows)
    (unit,) = followed.api.get(f"/jobs/{JOB}/units").json()["units"]
    assert unit["unit"] == 0
    assert stream.state_dict()["after"] == followed.api.get(f"/jobs/{JOB}/units").json()["next_after"]


def test_what_a_checkpoint_needs_no_more_is_removed_and_it_goes_on_behind_that(tmp_path: Path) -> None:
    """1. A trainer registers and reads into the second unit. 2. Its checkpoint lets the first one go.

    3. Another goes on from the checkpoint. 4. One that begins anew is told that a unit is gone.
    """
    settings = api_settings(tmp_path)
    consumed = a_request().model_copy(update={"storage": Storage(retention="consumed")})
    with stored(settings) as store, serving(settings) as api:
        made = Followed(settings, store, api)
        run_to_publishing(store, made.dataset, JOB, consumed, num_units=UNITS, rows=ROWS, captured=0)
        trainer = made.follow()
        trainer.acknowledge("trainer")
        made.capture(3)
        rows = iter(trainer)
        read = ids(islice(rows, ROWS + 1))
        trainer.acknowledge("trainer", [trainer.state_dict()], expires_s=3600)
        left = sorted(path.name for path in (made.dataset / "data" / JOB).glob("*.parquet"))
        assert left == [f"train-{unit:05d}.parquet" for unit in (1, 2)]
        made.capture(UNITS - 3)
        made.complete()
        resumed = made.follow()
        resumed.load_state_dict(trainer.state_dict())
        with pytest.raises(ReaderError, match="window"):
            narrow = made.follow(window=4)
            narrow.load_state_dict(trainer.state_dict())
            next(iter(narrow))
        assert read + ids(resumed) == EVERY
        resumed.acknowledge("trainer", [resumed.state_dict()])
        assert not list((made.dataset / "data" / JOB).glob("*.parquet"))
        with pytest.raises(ReaderError, match=r"unit 0 of job .* is gone"):
            next(iter(QuarryStream.follow(made.dataset, JOB, rank=0, world_size=1)))
        with pytest.raises(ReaderError, match=r"unit 0 of job .* is gone"):
            next(iter(made.follow(view=Eagle3())))
        with pytest.raises(ReaderError, match="name"):
            trainer.acknowledge("Not a name")
