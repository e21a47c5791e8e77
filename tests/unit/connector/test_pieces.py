from hypothesis import given, strategies as st

from connector.pieces import Part, pieces


def test_a_request_is_cut_only_where_a_piece_is_full():
    assert pieces([3, 9, 2], 5) == [
        [Part(0, slice(0, 3), last=True), Part(1, slice(0, 2), last=False)],
        [Part(1, slice(2, 7), last=False)],
        [Part(1, slice(7, 9), last=True), Part(2, slice(0, 2), last=True)],
    ]


def test_no_request_makes_no_piece():
    assert pieces([], 5) == []


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 20))
def test_every_row_is_in_one_piece_and_only_the_last_piece_is_not_full(num_rows, piece_rows):
    cut = pieces(num_rows, piece_rows)
    everything = range(max(num_rows, default=0))
    rows = [(part.request, row) for piece in cut for part in piece for row in everything[part.rows]]
    assert rows == [(request, row) for request, count in enumerate(num_rows) for row in range(count)]
    sizes = [sum(part.rows.stop - part.rows.start for part in piece) for piece in cut]
    assert all(size == piece_rows for size in sizes[:-1])
    assert all(0 < size <= piece_rows for size in sizes)
    ended = [part.request for piece in cut for part in piece if part.last]
    assert ended == list(range(len(num_rows)))
