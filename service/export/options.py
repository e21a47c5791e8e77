"""The options of an export. Has no heavy imports, so that the command line starts fast."""

from dataclasses import dataclass
from enum import StrEnum

from service.errors import OptionRefused


class FormatName(StrEnum):
    """The trainers; each has a module of the same name in `service.export.formats`."""

    SPECULATORS = "speculators"
    SPECFORGE = "specforge"
    TORCHSPEC = "torchspec"
    MODELOPT = "modelopt"
    ANGELSLIM = "angelslim"
    EAGLE = "eagle"
    DEEPSPEC = "deepspec"
    NEMO = "nemo"


class Algorithm(StrEnum):
    """The kinds of drafter."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    PEAGLE = "peagle"
    DFLASH = "dflash"
    DFLASH2 = "dflash2"
    DOMINO = "domino"
    DSPARK = "dspark"
    MTP = "mtp"
    XPRESS = "xpress"


ALGORITHMS: dict[FormatName, tuple[Algorithm, ...]] = {
    FormatName.SPECULATORS: (
        Algorithm.EAGLE3,
        Algorithm.PEAGLE,
        Algorithm.DFLASH,
        Algorithm.DFLASH2,
        Algorithm.DSPARK,
        Algorithm.XPRESS,
        Algorithm.MTP,
    ),
    FormatName.SPECFORGE: (Algorithm.EAGLE3, Algorithm.DFLASH, Algorithm.DOMINO, Algorithm.DSPARK),
    FormatName.TORCHSPEC: (Algorithm.EAGLE3, Algorithm.DFLASH, Algorithm.DSPARK),
    FormatName.MODELOPT: (Algorithm.EAGLE3, Algorithm.DFLASH),
    FormatName.ANGELSLIM: (Algorithm.EAGLE3,),
    FormatName.EAGLE: (Algorithm.EAGLE,),
    FormatName.DEEPSPEC: (Algorithm.DSPARK, Algorithm.DFLASH, Algorithm.EAGLE3),
    FormatName.NEMO: (Algorithm.DSPARK, Algorithm.EAGLE3),
}
"""The algorithms that each trainer's files can be written for; the first is the default."""

STATES_OF_LAST_ONLY = frozenset({Algorithm.EAGLE, Algorithm.MTP})
"""Algorithms that are fed only the last layer, so no auxiliary layer is read."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of one export.

    `layers` are vLLM's ids of the auxiliary layers; if None, all captured layers below the last. `jobs` are
    the dataset's jobs to export; if empty, all complete ones. `target` is the folder of the target model, if
    it cannot be read under the name in the dataset. `max_tokens` is the length to which a fixed-length format
    truncates or pads rows; if None, that of the longest row.
    """

    to: FormatName
    algorithm: Algorithm
    layers: tuple[int, ...] | None = None
    draft_vocab: int | None = None
    jobs: tuple[str, ...] = ()
    target: str | None = None
    revision: str | None = None
    max_tokens: int | None = None


def chosen_algorithm(to: FormatName, wanted: Algorithm | None) -> Algorithm:
    """Return the algorithm to write for. Raises OptionRefused (`algorithm`)."""
    possible = ALGORITHMS[to]
    if wanted is None:
        return possible[0]
    if wanted not in possible:
        raise OptionRefused(
            f"an export to {to} cannot be written for {wanted}",
            field="algorithm",
            cure=f"name one of {', '.join(possible)}",
        )
    return wanted


def parsed_layers(text: str | None) -> tuple[int, ...] | None:
    """Return the ids in `2,4,5`, ascending. Raises OptionRefused (`layers`)."""
    if text is None:
        return None
    cure = "give vLLM's layer ids, each once, such as 2,16,29"
    try:
        ids = tuple(sorted(int(part) for part in text.split(",")))
    except ValueError as error:
        raise OptionRefused(f"{text!r} is not a list of layer ids", field="layers", cure=cure) from error
    if len(set(ids)) != len(ids):
        raise OptionRefused(f"{text!r} names a layer twice", field="layers", cure=cure)
    return ids
