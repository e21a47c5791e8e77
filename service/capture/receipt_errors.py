"""What a failed receipt means: the error that decides what becomes of the unit."""

import errno
from collections.abc import Sequence

from schemas.receipts import UnitFailed, UnitSealed
from service.errors import DiskFull, EngineDied, QuarryError, StatesWrong, WriteFailed

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

ERRORS: dict[str, type[QuarryError]] = {
    "states-wrong": StatesWrong,
    "internal": EngineDied,
    "write-failed": WriteFailed,
    "plan-unreadable": WriteFailed,
}


def raise_failure(receipts: Sequence[UnitSealed | UnitFailed]) -> tuple[UnitSealed, ...]:
    """Return the receipts if all are of sealed files.

    Raises DiskFull, StatesWrong, EngineDied, WriteFailed.
    """
    sealed = []
    for receipt in receipts:
        if isinstance(receipt, UnitSealed):
            sealed.append(receipt)
            continue
        said = f"unit {receipt.key.unit}, rank {receipt.rank}: {receipt.detail}"
        if receipt.errno in FULL:
            raise DiskFull(said, cure="free space in the data folder, then resume the job")
        raise ERRORS[receipt.reason](said)
    return tuple(sealed)
