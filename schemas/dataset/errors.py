"""The dataset library's error, and the errno values of a full disk."""

import errno

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Values of `OSError.errno` if the disk, or the user's quota on it, is full."""


class DatasetError(ValueError):
    """A file of a dataset is invalid, or lacks what was requested; the message names the file."""
