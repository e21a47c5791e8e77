"""`python -m tests.contract.diagnose.refusals TARGET DATASET DRAFTER...`: why each is refused, by line."""

import sys
from pathlib import Path

from service.diagnose.drafter import Drafter
from service.diagnose.target import read_target
from service.errors import OptionRefused
from service.export.options import Algorithm, ExportOptions, FormatName
from service.export.source import open_dataset


def main(target: str, dataset: str, *drafters: str) -> None:
    options = ExportOptions(to=FormatName.SPECULATORS, algorithm=Algorithm.MTP, target=target)
    model = read_target(open_dataset(dataset, options))
    for folder in drafters:
        try:
            Drafter(Path(folder), model)
            print("not refused")
        except OptionRefused as error:
            print(error.field, error.detail)


if __name__ == "__main__":
    main(*sys.argv[1:])
