"""What the connector says of an attempt whose file or plan the file system refused."""

import errno

import pytest

from connector.writers import _fail_reason
from schemas.receipts import FailReason


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
    assert _fail_reason(error, opening=opening) == reason
