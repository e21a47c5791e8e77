"""Prefetching: threads make the next items while the current one is in use."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def made_ahead(
    make: Callable[[Item], Made], items: Iterable[Item], *, ahead: int, threads: int
) -> Iterator[Made]:
    """Yield `make(item)` for each item, in order, while threads work on up to `ahead` items after it.

    An error is raised in its item's place. After it, or when the iterator is closed, no new item is started,
    and the running ones are waited for.
    """
    coming: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                coming.append(pool.submit(make, item))
                if len(coming) > ahead:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
