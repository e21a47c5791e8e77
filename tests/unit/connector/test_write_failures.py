"""What the connector says of an attempt whose file or plan the file system refused."""

import errno

import pytest

from connector.writers import _write_failure
from schemas.receipts import FailReason
from tests.support.plans import identity, order


@pytest.mark.parametrize(
    ("error", "opening", "reason"),
    [
        (FileNotFoundError(errno.ENOENT, "no plan"), True, "plan-unreadable"),
        (OSError(errno.ENOSPC, "full"), True, "write-failed"),
        (OSError(errno.EIO, "broken"), False, "write-failed"),
    ],
)
def test_only_a_plan_that_cannot_be_opened_is_unreadable(
    error: OSError, opening: bool, reason: FailReason
) -> None:
    failed = _write_failure(order(identity(), 1).key, 0, error, opening=opening)
    assert (failed.reason, failed.errno) == (reason, error.errno)
