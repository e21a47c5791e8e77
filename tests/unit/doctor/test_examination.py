"""What stops a check is a finding too."""

import errno
from collections.abc import Iterator

import pytest

from service.doctor.examination import judged
from service.doctor.finding import Finding, Verdict
from service.errors import HubDenied, HubUnavailable

GOOD, DOUBTFUL, BAD, UNSEEN = Verdict
FREE = "free space there, or name another place"


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (
            ModuleNotFoundError("No module named 'sqlalchemy'", name="sqlalchemy"),
            Finding("it", UNSEEN, "sqlalchemy is not installed", "pip install 'eagle-quarry[service]'"),
        ),
        (HubDenied("no", cure="ask"), Finding("it", BAD, "no", "ask")),
        (HubUnavailable("silent"), Finding("it", BAD, "silent", HubUnavailable.usual_cure)),
        (
            PermissionError(13, "Permission denied", "/data/file"),
            Finding(
                "it",
                BAD,
                "/data/file: Permission denied",
                "let this user read and write there, or name another place",
            ),
        ),
        *(
            (OSError(number, "full", "/data"), Finding("it", BAD, "/data: full", FREE))
            for number in (errno.ENOSPC, errno.EDQUOT)
        ),
    ],
)
def test_what_stops_a_check_is_a_finding_beside_what_it_found(error, found):
    def check() -> Iterator[Finding]:
        yield Finding("one", GOOD, "fine", "nothing")
        yield Finding("two", DOUBTFUL, "perhaps", "look")
        raise error

    one, two, last = judged("it", check)
    assert (one.cure, two.cure) == (None, "look")
    assert last == found


def test_an_error_of_our_own_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        list(judged("it", lambda: iter([1 // 0])))
