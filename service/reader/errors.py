"""What the reader raises: the dataset is not what its metadata says, or lacks what was asked for."""

from schemas.dataset.errors import DatasetError as ReaderError

__all__ = ["JobsDiffer", "ReaderError"]


class JobsDiffer(ReaderError):
    """The jobs of a dataset hold other states than each other."""
