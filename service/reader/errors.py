"""The reader's errors: the dataset does not match its metadata, or lacks what was requested."""

from schemas.dataset.errors import DatasetError as ReaderError

__all__ = ["JobsDiffer", "ReaderError"]


class JobsDiffer(ReaderError):
    """The jobs of a dataset hold different kinds of states."""
