"""A chart with all that must stand beside it: what a healthy one looks like, and its numbers as text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """`svg` is safe markup of ours, all else plain text.

    `healthy` ends the sentence "A healthy one: ..."; `fact` is what this one says, `odd` what it warns of;
    `header` and `rows` are its numbers as a table; a `tall` one has others beside it.
    """

    title: str
    healthy: str
    svg: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    fact: str = ""
    odd: str = ""
    tall: bool = False
