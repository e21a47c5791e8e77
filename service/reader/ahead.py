"""Threads that work ahead: they make what comes next while one thing is in use."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def made_ahead(
    make: Callable[[Item], Made], items: Iterable[Item], *, ahead: int, threads: int
) -> Iterator[Made]:
    """Yield what `make` returns of each item, in order; threads begin with the next `ahead` meanwhile.

    An error comes in its item's place. After it, or where nobody takes more, no item is begun, and those
    that are begun have ended.
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
