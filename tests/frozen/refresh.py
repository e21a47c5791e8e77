"""`python -m tests.frozen.refresh`: freeze today's surface if the changelog names every break."""

import json
import sys

from tests.frozen.surface import CHANGELOG, FOLDER, all_breaks, current, unnamed


def main() -> int:
    """Write the documents and return 0; or print what no entry names and return 1."""
    left = unnamed(all_breaks(), CHANGELOG.read_text())
    for one in left:
        print(one, file=sys.stderr)
    if left:
        print("nothing was frozen: CHANGELOG.md has no entry for these under Unreleased", file=sys.stderr)
        return 1
    FOLDER.mkdir(exist_ok=True)
    for name, document in current().items():
        (FOLDER / f"{name}.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
