"""The one error of the reader: the dataset is not what its metadata says, or lacks what was asked for."""

from schemas.dataset.errors import DatasetError as ReaderError

__all__ = ["ReaderError"]
