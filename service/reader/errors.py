"""The one error of the reader."""


class ReaderError(ValueError):
    """The dataset is not what its own metadata says, or does not hold what was asked for."""
