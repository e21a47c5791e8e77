"""The Hub token, and whether it may write to a repository."""

from collections.abc import Iterator

from schemas.request import HubTarget
from service.artifacts.repository import Patience, Repository
from service.doctor.finding import Finding, Verdict
from service.settings import Settings

ONCE = Patience(attempts=2, deadline_s=30.0)


def token(settings: Settings, target: HubTarget | None) -> Iterator[Finding]:
    """Ask the Hub whether the token may write. Raises HubDenied, HubUnavailable."""
    if target is None:
        kind = "no token is set" if settings.token() is None else "a token is set"
        detail = f"{kind}; without --repo the Hub is not asked"
        yield Finding("hub", Verdict.UNSEEN, detail, "name a repository that this node is to push to")
        return
    repository = Repository(target, settings, ONCE)
    repository.check_right()
    what = "exists" if repository.exists() else "is not there, and the first push will make it"
    yield Finding("hub", Verdict.GOOD, f"{target.repo_id} {what}; the token may write")
