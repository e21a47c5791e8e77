"""The stream: every row once an epoch, whatever the ranks, workers, seeds and restarts."""

import copy
import pickle
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch.utils.data import DataLoader

from service.reader import Eagle3, QuarryDataset, QuarryStream, ReaderError, Row
from tests.contract.reader.conftest import NUM_SAMPLES


def ids(rows) -> list[str]:
    return [row.sample_id for row in rows]


def of_rank(plain, rank: int, world_size: int, **changes) -> QuarryStream:
    return QuarryStream(QuarryDataset(plain), rank=rank, world_size=world_size, **changes)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_ranks_share_the_rows_and_none_is_read_twice(plain, world_size):
    shares = [ids(of_rank(plain, rank, world_size)) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    read = [sample_id for share in shares for sample_id in share]
    assert len(read) == len(set(read)) == NUM_SAMPLES // world_size * world_size


def test_without_even_no_row_is_left_out(plain):
    shares = [ids(of_rank(plain, rank, 3, even=False)) for rank in range(3)]
    assert sorted(map(len, shares)) == [13, 13, 14]
    assert len({sample_id for share in shares for sample_id in share}) == NUM_SAMPLES


def test_an_epoch_has_an_order_of_its_own_that_the_seed_repeats(plain):
    stream = of_rank(plain, 0, 1, seed=5)
    first = ids(stream)
    assert first == ids(stream)
    stream.set_epoch(1)
    second = ids(stream)
    assert second != first
    assert sorted(second) == sorted(first)
    again = of_rank(plain, 0, 1, seed=5)
    again.set_epoch(1)
    assert ids(again) == second
    assert ids(of_rank(plain, 0, 1, seed=6)) != first


def test_without_shuffling_rows_come_in_index_order(plain):
    assert ids(of_rank(plain, 0, 1, shuffle=False)) == [row.sample_id for row in QuarryDataset(plain)]


def test_a_window_keeps_reading_local(plain):
    dataset = QuarryDataset(plain)
    stream = QuarryStream(dataset, rank=0, world_size=1, window=1)
    shards = [dataset.shard_of(number) for number in stream.order()]
    changes = sum(here != there for here, there in pairwise(shards))
    assert changes == len(set(shards)) - 1 > 0


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("start", [0, 3, 2 * NUM_SAMPLES])
def test_start_skips_rows_of_the_first_epoch_and_the_length_needs_no_order(plain, monkeypatch, even, start):
    """A trainer asks for the length again and again, and the order of a million rows takes seconds."""
    whole = [ids(of_rank(plain, rank, 3, even=even)) for rank in range(3)]
    streams = [of_rank(plain, rank, 3, even=even, start=start) for rank in range(3)]
    assert [ids(stream) for stream in streams] == [rows[start:] for rows in whole]
    with monkeypatch.context() as without_order:
        without_order.setattr(QuarryStream, "order", None)
        assert [len(stream) for stream in streams] == [len(rows[start:]) for rows in whole]
    streams[0].set_epoch(1)
    assert len(ids(streams[0])) == len(streams[0]) == len(whole[0])


@pytest.mark.slow
def test_workers_share_a_ranks_rows(plain):
    stream = QuarryStream(QuarryDataset(plain, view=Eagle3()), rank=0, world_size=2)
    loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    alone = sorted(view["input_ids"].tolist() for view in stream)
    assert sorted(view["input_ids"].tolist() for view in loader) == alone
    assert len(alone) == NUM_SAMPLES // 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_that_outlive_an_epoch_begin_the_one_that_was_set(plain, method):
    """1. A training goes on inside its first epoch. 2. Its second has an order of its own, and every row."""
    dataset = QuarryDataset(plain, view=Eagle3())
    stream, alone = (QuarryStream(dataset, rank=0, world_size=1, start=3) for _ in range(2))
    loader = DataLoader(
        stream, batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context=method
    )
    for epoch in range(3):
        if epoch:
            stream.set_epoch(epoch)
            alone.set_epoch(epoch)
        seen, expected = ([view["input_ids"].tolist() for view in rows] for rows in (loader, alone))
        assert len(expected) == (NUM_SAMPLES if epoch else NUM_SAMPLES - 3)
        assert seen == expected


def test_a_map_style_loader_batches_by_a_sampler(plain):
    dataset = QuarryDataset(plain, view=Eagle3())
    loader = DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=list)
    seen = [view for batch in loader for view in batch]
    assert len(seen) == NUM_SAMPLES
    assert all(isinstance(view["hidden_states"], torch.Tensor) for view in seen)


def test_rank_and_world_size_come_from_the_launcher(plain, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ids(QuarryStream(QuarryDataset(plain))) == ids(of_rank(plain, 1, 2))


class Seen:
    """A view that notes which rows it was given, and refuses one."""

    def __init__(self, refused: str | None = None) -> None:
        self.refused = refused
        self.sample_ids: list[str] = []

    def check(self, _about: object) -> None:
        """Any dataset will do."""

    def __call__(self, row: Row) -> Row:
        self.sample_ids.append(row.sample_id)
        if row.sample_id == self.refused:
            raise ReaderError("refused")
        return row


@pytest.mark.parametrize("ahead", [0, 1, 2, 7])
def test_rows_read_ahead_come_in_the_same_order_and_no_more_are_held(plain, ahead):
    whole, seen = ids(of_rank(plain, 0, 1)), Seen()
    stream = QuarryStream(QuarryDataset(plain, view=seen), rank=0, world_size=1, ahead=ahead)
    came = []
    for row in stream:
        came.append(row.sample_id)
        assert len(seen.sample_ids) <= len(came) + ahead
    assert came == whole
    assert sorted(seen.sample_ids) == sorted(whole)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [0, 1, 17, NUM_SAMPLES])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_restored_stream_goes_on_where_it_was(plain, stop, ahead):
    """What was read ahead does not count as done."""
    whole, dataset = ids(of_rank(plain, 0, 1)), QuarryDataset(plain, view=Seen())
    rows: Iterator[Row] = iter(stream := QuarryStream(dataset, rank=0, world_size=1, ahead=ahead))
    before = [next(rows).sample_id for _ in range(stop)]
    resumed = QuarryStream(dataset, rank=0, world_size=1, ahead=ahead)
    resumed.load_state_dict(stream.state_dict())
    assert before + ids(resumed) == whole
    assert ids(resumed) == whole


def test_a_state_is_the_loaded_one_until_rows_are_read(plain):
    """A trainer that makes a checkpoint before its first step does not repeat rows, nor skip any."""
    stream = of_rank(plain, 0, 1)
    whole, at_end = ids(stream), stream.state_dict()
    for done in (7, 0):
        state = at_end | {"done": done, "num_workers": 2 if done else 1}
        stream.load_state_dict(state)
        assert stream.state_dict() == state
    assert ids(stream) == whole
    assert stream.state_dict() == at_end


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("seed", {"seed": 1}),
        ("window", {"window": 8}),
        ("shuffle", {"shuffle": False}),
        ("even", {"even": False}),
        ("world_size", {"world_size": 3}),
    ],
)
def test_a_state_of_another_order_is_refused_unless_nothing_was_read(plain, name, changes):
    dataset, given = QuarryDataset(plain), {"rank": 0, "world_size": 2}
    stream, other = QuarryStream(dataset, **given), QuarryStream(dataset, **given | changes)
    other.load_state_dict(stream.state_dict())
    next(rows := iter(stream))
    with pytest.raises(ReaderError, match=f"made with {name} .*, not {changes[name]}"):
        other.load_state_dict(stream.state_dict())
    stream.load_state_dict(stream.state_dict())
    rows.close()


def test_a_state_is_good_for_as_many_workers_and_the_same_jobs(plain):
    """The worker says so once there are workers: a state is loaded before."""
    stream = QuarryStream(QuarryDataset(plain, view=Eagle3()), rank=0, world_size=1)
    next(iter(stream))
    state = stream.state_dict()
    with pytest.raises(ReaderError, match="made with jobs another"):
        stream.load_state_dict(state | {"jobs": "another"})
    stream.load_state_dict(state)
    with pytest.raises(ReaderError, match="made with num_workers 1, not 2"):
        list(DataLoader(stream, batch_size=None, num_workers=2))
    assert len(list(DataLoader(stream, batch_size=None, num_workers=1))) == NUM_SAMPLES - 1


@pytest.mark.parametrize("stop", [0, 5, NUM_SAMPLES])
def test_the_epoch_that_is_set_first_after_a_restart_goes_on_and_the_next_is_whole(plain, stop):
    """As trainers do: for each epoch from the last one on, set it and read it."""
    dataset, given = QuarryDataset(plain), {"rank": 0, "world_size": 1}
    stream, alone = QuarryStream(dataset, **given), QuarryStream(dataset, **given)
    orders = []
    for epoch in range(3):
        alone.set_epoch(epoch)
        orders.append(ids(alone))
    stream.set_epoch(1)
    rows = iter(stream)
    before = [next(rows).sample_id for _ in range(stop)]
    resumed = QuarryStream(dataset, **given)
    resumed.load_state_dict(stream.state_dict())
    resumed.set_epoch(1)
    assert before + ids(resumed) == orders[1]
    resumed.set_epoch(2)
    assert ids(resumed) == orders[2]
    begun = QuarryStream(dataset, **given, start=7)
    begun.set_epoch(0)
    assert ids(begun) == orders[0][7:]
    begun.set_epoch(1)
    assert ids(begun) == orders[1]


def test_what_was_set_before_a_state_was_loaded_is_for_the_iteration_after_it(plain):
    """A state of the end of an epoch is loaded when the next one was set; its first row is not there yet."""
    stream = QuarryStream(QuarryDataset(plain), rank=0, world_size=1)
    first, at_end = ids(stream), stream.state_dict()
    resumed = QuarryStream(QuarryDataset(plain), rank=0, world_size=1)
    resumed.set_epoch(1)
    resumed.load_state_dict(at_end)
    assert ids(resumed) == []
    second = ids(resumed)
    assert sorted(second) == sorted(first) and second != first
    rows = iter(resumed)
    resumed.load_state_dict(at_end)
    assert len(list(rows)) == NUM_SAMPLES, "a state that is loaded after `iter` is for the next one"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
def test_workers_of_a_copied_stream_hear_of_its_epochs(plain, copied):
    stream = copied(QuarryStream(QuarryDataset(plain, view=Eagle3()), rank=0, world_size=1))
    loader = DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True)
    orders = []
    for epoch in range(2):
        stream.set_epoch(epoch)
        orders.append([view["input_ids"].tolist() for view in loader])
    assert orders[0] != orders[1]


@pytest.mark.parametrize("ahead", [0, 3])
def test_an_error_comes_in_its_rows_place_and_no_thread_stays(plain, ahead):
    whole, threads = ids(of_rank(plain, 0, 1)), set(threading.enumerate())
    dataset = QuarryDataset(plain, view=Seen(refused=whole[6]))
    came = []
    with pytest.raises(ReaderError, match="refused"):
        for row in QuarryStream(dataset, rank=0, world_size=1, ahead=ahead):
            came.append(row.sample_id)
    assert came == whole[:6]
    assert set(threading.enumerate()) == threads


def test_a_stream_that_is_left_early_leaves_no_thread(plain):
    threads = set(threading.enumerate())
    rows = iter(QuarryStream(QuarryDataset(plain, view=Eagle3()), rank=0, world_size=1, ahead=5))
    next(rows)
    rows.close()
    assert set(threading.enumerate()) == threads


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rank": 2}, "rank 2 of 2"),
        ({"window": 0}, "window 0"),
        ({"start": -1}, "start -1"),
        ({"ahead": -1}, "ahead -1"),
    ],
)
def test_impossible_arguments_are_refused(plain, changes, told):
    with pytest.raises(ReaderError, match=told):
        QuarryStream(QuarryDataset(plain), **({"rank": 0, "world_size": 2} | changes))
