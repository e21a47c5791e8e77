"""Why a job ended without rows: who said no, and the first exception in the engine's log."""

import re

from schemas.job import Problem
from tests.architectures.results import Verdict

_PREFIX = re.compile(r"^\(\w+[^)]*\) (?:ERROR [^\]]*\] ?)?")
_RAISED = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Exit)(?:: .+)?$")
_NEWS_OF_A_DEATH = (
    "Engine core initialization failed",
    "EngineDeadError",
    "WorkerProc initialization failed",
    "Worker failed with error",
)
MAX_CHARS = 300


def refuser(problem: Problem) -> tuple[str, Verdict]:
    """Return who ended the job, and whether it was a refusal or the engine's death."""
    slug = problem.type.removeprefix("urn:quarry:")
    if slug == "engine-died" or (slug == "engine-refused" and problem.detail.startswith("vLLM refuses")):
        return "the engine", Verdict.CANNOT_RUN
    if slug == "states-wrong" and problem.detail.startswith("canary"):
        return "the canary", Verdict.REFUSED
    return {"engine-refused": "Quarry", "states-wrong": "the row checks"}.get(slug, slug), Verdict.REFUSED


def root_cause(log: str) -> str | None:
    """Return the first exception in a log that is no news of another's death, with what it asserted."""
    before = ""
    for line in log.splitlines():
        said = _PREFIX.sub("", line.strip()).strip()
        if _RAISED.match(said) and not any(news in said for news in _NEWS_OF_A_DEATH):
            return (f"{said}: {before}" if ": " not in said else said)[:MAX_CHARS]
        if not set(said) <= {"^", "~"}:
            before = said
    return None
