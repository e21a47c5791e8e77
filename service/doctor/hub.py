"""Checks the Hub token, and whether it may write to a repository."""

from collections.abc import Iterator

from schemas.request import HubTarget
from service.artifacts.repository import Patience, Repository
from service.doctor.check_result import CheckResult, Verdict
from service.settings import Settings


def token(settings: Settings, target: HubTarget | None) -> Iterator[CheckResult]:
    """Ask the Hub whether the token may write. Raises HubDenied, HubUnavailable."""
    if target is None:
        none = "no token is set" if settings.hub_token_file is None else "QUARRY_HUB_TOKEN_FILE is empty"
        kind = none if settings.token() is None else "a token is set"
        detail = f"{kind}; without --repo the Hub is not asked"
        yield CheckResult("hub", Verdict.UNSEEN, detail, "name a repository that this node is to push to")
        return
    Repository(target, settings, Patience(attempts=2)).check_right()
    yield CheckResult("hub", Verdict.GOOD, f"the token may write to {target.repo_id}")
