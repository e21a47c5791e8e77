"""What stops a check is a result too."""

import errno
from collections.abc import Iterator

import pytest

from service.doctor.check_result import CheckResult, Verdict
from service.doctor.examination import judged
from service.errors import HubDenied, HubUnavailable

GOOD, DOUBTFUL, BAD, UNSEEN = Verdict
FREE = "free space there, or name another place"


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (
            ModuleNotFoundError("No module named 'sqlalchemy'", name="sqlalchemy"),
            CheckResult("it", UNSEEN, "sqlalchemy is not installed", "pip install 'eagle-quarry[service]'"),
        ),
        (HubDenied("no", cure="ask"), CheckResult("it", BAD, "no", "ask")),
        (HubUnavailable("silent"), CheckResult("it", BAD, "silent", HubUnavailable.usual_cure)),
        (
            PermissionError(13, "Permission denied", "/data/file"),
            CheckResult(
                "it",
                BAD,
                "/data/file: Permission denied",
                "let this user read and write there, or name another place",
            ),
        ),
        *(
            (OSError(number, "full", "/data"), CheckResult("it", BAD, "/data: full", FREE))
            for number in (errno.ENOSPC, errno.EDQUOT)
        ),
    ],
)
def test_what_stops_a_check_is_a_result_beside_what_it_found(error, found):
    def check() -> Iterator[CheckResult]:
        yield CheckResult("one", GOOD, "fine", "nothing")
        yield CheckResult("two", DOUBTFUL, "perhaps", "look")
        raise error

    one, two, last = judged("it", check)
    assert (one.cure, two.cure) == (None, "look")
    assert last == found


def test_an_error_of_our_own_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        list(judged("it", lambda: iter([1 // 0])))
