"""Reads a Quarry dataset for training; needs no engine and no database.

`QuarryDataset` is map-style, `QuarryStream` is iterable and sharded over ranks and workers, and
`QuarryStream.follow` reads a job while it is being captured. A view turns a stored row into the training
inputs of one kind of drafter. Data flow: folder, service or repository -> places -> shard -> row -> view.
"""

from service.reader.dataset import QuarryDataset
from service.reader.errors import ReaderError
from service.reader.follow import QuarryFollower
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
    "QuarryFollower",
    "QuarryStream",
    "ReaderError",
    "Row",
    "Step35Mtp",
    "View",
]
