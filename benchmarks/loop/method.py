"""The ways to draft that the loop trains and serves: what the trainer is told of each, and what vLLM is."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Method:
    """One way to draft on the states of EAGLE-3's layers, all served by vLLM's `eagle3`."""

    trainers: str
    """The trainer's `--speculator-type`."""
    depth: str
    """The trainer's option for how many tokens a drafter drafts."""
    title: str
    prefix: str = ""
    """Begins the names of its drafters' stages after `trained-`."""
    serving: Mapping[str, bool] = field(default_factory=dict)
    """Put into vLLM's speculative config."""

    @property
    def decides(self) -> dict[str, object]:
        """What of it decides a stage; empty for the method that a stage is of when nothing is said."""
        return {"method": self.trainers} if self.prefix else {}


EAGLE3 = Method("eagle3", "--ttt-steps", "EAGLE-3")
PEAGLE = Method("peagle", "--num-depths", "P-EAGLE", "peagle-", {"parallel_drafting": True})
"""All tokens in one pass: after the first, each is drafted from a mask token and a trained mask state."""
