"""All checks of a node, one after another; one that cannot be made is a finding too."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from schemas.request import HubTarget
from service.doctor import engine, hub, machine, store
from service.doctor.finding import Finding, Verdict
from service.errors import QuarryError
from service.installed import extra_of
from service.settings import Settings


def examine(settings: Settings, model: str | None, target: HubTarget | None) -> Iterator[Finding]:
    """Yield what is found of this node, and of a model and a repository where they are given.

    A file is written into the data folder and removed; nothing else is changed.
    """
    cards: list[engine.Card] = []
    build = engine.TorchBuild()

    def gpus() -> Iterator[Finding]:
        cards.extend(engine.cards())
        yield from engine.driver(cards, build)
        yield from engine.gpus(settings, cards, build)

    def wheel() -> Iterator[Finding]:
        nonlocal build
        build = engine.torch_build()
        return engine.wheel(settings, build)

    yield from judged("engine", wheel)
    yield from judged("driver", gpus)
    if model is not None:
        yield from judged("model", lambda: engine.model(model, settings, cards))
    yield from judged("cores", lambda: machine.cores(settings, len(cards)))
    yield from judged("memory", lambda: machine.memory(settings, len(cards)))
    yield from judged("shared memory", lambda: machine.shared_memory(settings))
    yield from judged("open files", lambda: machine.open_files(settings))
    yield from judged("disk", lambda: machine.disk(settings, len(cards)))
    yield from judged("database", lambda: store.database(settings))
    yield from judged("hub", lambda: hub.token(settings, target))


def judged(what: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield what a check finds; what stops it is a finding, and what is good needs no cure."""
    try:
        for finding in check():
            yield replace(finding, cure=None) if finding.verdict is Verdict.GOOD else finding
    except ModuleNotFoundError as error:
        cure = f"pip install 'eagle-quarry[{extra_of(error.name or '') or 'service'}]'"
        yield Finding(what, Verdict.UNSEEN, f"{error.name} is not installed", cure)
    except ValueError as error:
        yield Finding(
            what, Verdict.UNSEEN, f"not understood: {error}", "report it, with what nvidia-smi says"
        )
    except ImportError as error:
        yield Finding(what, Verdict.BAD, f"cannot be imported: {error}", "install it anew")
    except QuarryError as error:
        yield Finding(what, Verdict.BAD, error.detail, error.cure)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        cure = "let this user read and write there, or name another place"
        yield Finding(what, Verdict.BAD, f"{where}{error.strerror or error}", cure)
