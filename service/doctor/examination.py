"""Runs all checks of a node, one after another; a check that fails or hangs has a result, too."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from schemas.dataset.errors import NO_SPACE
from schemas.request import HubTarget
from service import apart
from service.doctor import engine, hub, machine, secret_files, store
from service.doctor.check_result import CheckResult, Verdict
from service.errors import QuarryError
from service.installed import engine_versions, extra_of
from service.settings import Settings

CHECK_S = 15.0
"""Time limit for a check that asks a server, a driver or a disk; most take a second."""
TORCH_S = 60.0
"""Time limit for importing torch from a cold disk and starting CUDA on eight GPUs."""
ALL_BYTES = 2**62
"""No memory limit: CUDA maps more than the machine has."""


def examine(settings: Settings, model: str | None, target: HubTarget | None) -> Iterator[CheckResult]:
    """Yield the results about this node, and about a model and a repository if given.

    A temporary file is written to the data folder's disk; nothing else is changed.
    """
    torch = engine.Torch()

    def gpus() -> Iterator[CheckResult]:
        nonlocal torch
        torch = apart.call(engine.try_torch, memory_bytes=ALL_BYTES, deadline_s=TORCH_S)
        yield from engine.driver(torch)
        yield from engine.gpus(settings, torch.gpus)

    yield from judged("engine", lambda: engine.wheel(settings))
    if engine_versions():
        yield from judged("driver", gpus)
    num_gpus = len(torch.gpus)
    if model is not None:
        yield from judged_apart("model", engine.model, model, settings, torch.gpus)
    yield from judged("cores", lambda: machine.cores(settings, num_gpus))
    yield from judged("memory", lambda: machine.memory(settings, num_gpus))
    yield from judged("shared memory", lambda: machine.shared_memory(settings))
    yield from judged_apart("disk", machine.disk, settings, num_gpus)
    yield from judged_apart("database", store.database, settings)
    for what, check in secret_files.checks(settings).items():
        yield from judged_apart(what, check, settings)
    yield from judged_apart("hub", hub.token, settings, target)


def judged_apart(
    what: str, check: Callable[..., Iterator[CheckResult]], *args: object
) -> Iterator[CheckResult]:
    """Like `judged`, in a process that is killed if what it asks does not respond."""
    call = (_judged, what, check, args)
    return judged(what, lambda: apart.call(*call, memory_bytes=ALL_BYTES, deadline_s=CHECK_S))


def _judged(
    what: str, check: Callable[..., Iterator[CheckResult]], args: tuple[object, ...]
) -> list[CheckResult]:
    return list(judged(what, lambda: check(*args)))


def judged(what: str, check: Callable[[], Iterable[CheckResult]]) -> Iterator[CheckResult]:
    """Yield the results of a check; an error becomes a result, and good results have no cure."""
    try:
        for result in check():
            yield replace(result, cure=None) if result.verdict is Verdict.GOOD else result
    except ModuleNotFoundError as error:
        cure = f"pip install 'eagle-quarry[{extra_of(error.name or '') or 'service'}]'"
        yield CheckResult(what, Verdict.UNSEEN, f"{error.name} is not installed", cure)
    except apart.Ended as error:
        cure = "see whether the server, the disk or the driver that it asks is silent"
        yield CheckResult(what, Verdict.BAD, f"the check {error}", cure)
    except QuarryError as error:
        yield CheckResult(what, Verdict.BAD, error.detail, error.cure or error.usual_cure)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        cure = "let this user read and write there, or name another place"
        if error.errno in NO_SPACE:
            cure = "free space there, or name another place"
        yield CheckResult(what, Verdict.BAD, f"{where}{error.strerror or error}", cure)
