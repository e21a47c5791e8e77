"""`python -m tests.frozen.make_values NAME ...`: write what today's code gives for datasets. No test runs it.

Run once for a new dataset, by the code that wrote it. Values that are there are promises, never made again.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from tests.frozen.values import DATASETS, HERE, export, exports_of, read, verify


def main(name: str) -> None:
    """Write `datasets/NAME.json`."""
    folder, path = DATASETS / name, DATASETS / f"{name}.json"
    assert not path.exists(), f"{path} is a promise"
    os.chdir(HERE)
    values = {"read": read(folder), "verify": verify(folder), "exports": {}}
    for one in exports_of(name):
        with tempfile.TemporaryDirectory() as scratch:
            values["exports"][one] = export(one, folder, Path(scratch) / "out")
    path.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(argument)
