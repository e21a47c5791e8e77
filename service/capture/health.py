"""How the engine of one worker fares with each model: deaths in a row, a pause after each, and a long rest.

Pure: the time is passed in, in seconds from any beginning.
"""

from dataclasses import dataclass

from service.store import EngineHealth, LeftOut

PAUSES = (1 / 3600, 1 / 360, 1.0)
"""After the first death, the second, and the third and every further one, as shares of the rest."""


@dataclass(frozen=True, slots=True)
class _Deaths:
    """Deaths in a row over one model: no unit was proven since. `units` are those that it died on alone."""

    number: int
    cause: str
    until_s: float
    units: frozenset[str]


class Health:
    """Decides what a worker takes after its engine has died, and for how long it takes nothing of a model.

    After a death it takes one unit of the model at a time, as a probe, until one is proven.
    """

    def __init__(self, rest_s: float) -> None:
        """Begin healthy; `rest_s` is how long to rest after the third death in a row."""
        self._rest_s = rest_s
        self._deaths: dict[str, _Deaths] = {}

    def died(self, model: str, cause: str, now_s: float, unit: str | None = None) -> None:
        """Count a death; `unit` names the one that ran alone."""
        before = self._deaths.get(model, _Deaths(0, "", 0.0, frozenset()))
        pause_s = PAUSES[min(before.number, len(PAUSES) - 1)] * self._rest_s
        units = before.units | ({unit} if unit is not None else frozenset())
        self._deaths[model] = _Deaths(before.number + 1, cause, now_s + pause_s, units)

    def proven(self, model: str) -> None:
        """Forget the deaths: the engine has captured a unit that was proven."""
        self._deaths.pop(model, None)

    def probes(self, model: str) -> bool:
        """Say whether the next unit of a model is a probe."""
        return model in self._deaths

    def left_out(self, now_s: float) -> LeftOut:
        """Return what the worker takes no unit of: models that it waits for, and units that it died on alone.

        Another unit than those says more: whether the worker is at fault.
        """
        models = frozenset(model for model, deaths in self._deaths.items() if now_s < deaths.until_s)
        return LeftOut(models, frozenset().union(*(deaths.units for deaths in self._deaths.values())))

    def report(self, now_s: float) -> tuple[EngineHealth, ...]:
        """Return the models that the engine has died over."""
        return tuple(
            EngineHealth(
                model=model,
                deaths=deaths.number,
                cause=deaths.cause,
                rest_s=max(deaths.until_s - now_s, 0.0) if deaths.number >= len(PAUSES) else 0.0,
            )
            for model, deaths in self._deaths.items()
        )
