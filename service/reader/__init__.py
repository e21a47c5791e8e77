"""Reads a Quarry dataset for training. Of this project it needs `schemas` alone, and no engine or database.

`QuarryDataset` is map-style, `QuarryStream` iterable and sharded over ranks and workers; a view turns a
stored row into what a kind of drafter trains on. Data goes folder or repository -> places -> shard -> row ->
view.
"""

from service.reader.dataset import QuarryDataset
from service.reader.errors import ReaderError
from service.reader.row import Row
from service.reader.stream import QuarryStream
from service.reader.views import DFlash, Eagle, Eagle3, Mtp, PEagle, Step35Mtp, View

__all__ = [
    "DFlash",
    "Eagle",
    "Eagle3",
    "Mtp",
    "PEagle",
    "QuarryDataset",
    "QuarryStream",
    "ReaderError",
    "Row",
    "Step35Mtp",
    "View",
]
