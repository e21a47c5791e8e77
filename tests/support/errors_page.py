"""Writes `docs/errors.md` from the tree of errors: python -m tests.support.errors_page."""

from collections.abc import Iterator
from pathlib import Path

from service.errors import Outcome, QuarryError, problem_slug

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
HEAD = """# What went wrong, and what to do

Every error has a `type` that never changes, a `detail` that says what happened, the `field` of the request
or the setting that is at fault where there is one, and a `cure`, often more exact than the usual one below.
`quarry jobs show ID` prints the error of a job, `GET /jobs/{id}/events` those that it recovered from, and
`quarry jobs rejects ID` the samples that are in no shard.

What becomes of the work that an error stopped:

| word | meaning |
| --- | --- |
| fails | the job ends as `failed`; `quarry jobs resume ID` tries again with all that is committed |
| retried | it is tried again automatically, a limited number of times |
| waits | the job is `blocked` until a person has done what the cure says and resumes it; all is kept |
| not counted | it is tried again automatically, as often as needed: the work is not at fault |

`python -m tests.support.errors_page` makes this page from [service/errors.py](../service/errors.py).

| `type`, after `urn:quarry:` | HTTP | what it means | the work | usual cure |
| --- | --- | --- | --- | --- |
"""
WORDS = {
    Outcome.FAIL: "fails",
    Outcome.RETRY: "retried",
    Outcome.BLOCK: "waits",
    Outcome.VOID: "not counted",
}


TAIL = """
Two more are the client's: `server-unreachable`, where the service does not answer, and `unexpected-answer`,
where what answers is not Quarry or is newer than the client. `system-refused` is a file that the command line
could not read or write. A refusal by HTTP itself is named after its status, such as `content-too-large`.
"""


def every(kind: type[QuarryError] = QuarryError) -> Iterator[type[QuarryError]]:
    """Yield the tree, each class before those below it."""
    yield kind
    for below in kind.__subclasses__():
        yield from every(below)


def page() -> str:
    return HEAD + "".join(f"{line}\n" for line in _lines()) + TAIL


def _lines() -> Iterator[str]:
    for kind in every():
        meaning = (
            " ".join(str(kind.__doc__).split()) if kind is not QuarryError else "An error of Quarry's own."
        )
        what = (
            f"`{problem_slug(kind)}` | {kind.status} | {meaning} | {WORDS[kind.outcome]} | {kind.usual_cure}"
        )
        yield f"| {what} |"


if __name__ == "__main__":
    PAGE.write_text(page())
