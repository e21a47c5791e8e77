"""The error of the dataset library, and the system's numbers for a full disk."""

import errno

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
"""`OSError.errno` where the disk, or the user's share of it, is full."""


class DatasetError(ValueError):
    """A file of a dataset is not what it must be, or does not hold what was asked for; names the file."""
