"""The list of mutants that no fast test notices, each with the reason why it may live."""

from collections.abc import Collection

LIST = "tests/mutants/survivors.txt"
KINDS = {"equivalent", "unreachable", "slow", "accepted"}
"""It does the same; nothing gets there, an assertion; a test that is left out notices; not worth a test."""


def read(text: str, sites: Collection[str]) -> dict[str, str]:
    """Return the reason of each site that a list names, one a line: `site  kind: reason`.

    Raises ValueError naming every line without a site that exists, a kind of `KINDS`, or a reason.
    """
    reasons, wrong = {}, []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        site, _, reason = line.partition("  ")
        kind, _, why = reason.strip().partition(": ")
        if site not in sites or kind not in KINDS or not why.strip() or site in reasons:
            wrong.append(line)
        reasons[site] = reason.strip()
    if wrong:
        raise ValueError(f"{LIST}: no such site, no reason, or named twice:\n" + "\n".join(wrong))
    return reasons
