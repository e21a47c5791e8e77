"""Checks the files of secrets that a service reads, beside the Hub token's."""

from collections.abc import Callable, Iterator

from service.doctor.check_result import CheckResult, Verdict
from service.settings import Settings


def checks(settings: Settings) -> dict[str, Callable[[Settings], Iterator[CheckResult]]]:
    """Return the checks of the files that are set; none on a worker apart from the service: it reads none."""
    files = {
        "admin key": (settings.admin_key_file, admin_key),
        "webhook secret": (settings.webhook_secret_file, webhook_secret),
    }
    return {what: check for what, (file, check) in files.items() if file is not None and settings.is_at_home}


def admin_key(settings: Settings) -> Iterator[CheckResult]:
    """Check the operator's key: without it, 'quarry serve' does not start. Raises OptionRefused."""
    from service.control import keys

    keys.admin_key(settings)
    yield CheckResult("admin key", Verdict.GOOD, f"{settings.admin_key_file} has one")


def webhook_secret(settings: Settings) -> Iterator[CheckResult]:
    """Check the secret of webhooks: without it, no job's end is reported. Raises OptionRefused."""
    from service.control import webhooks

    webhooks.secret(None, settings)
    yield CheckResult("webhook secret", Verdict.GOOD, f"{settings.webhook_secret_file} has one")
