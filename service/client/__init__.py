"""A running service from Python: `Quarry` blocks, `AsyncQuarry` awaits; both have the same methods."""

from service.client.clients import AsyncQuarry, Quarry
from service.client.problem import ProblemReceived

__all__ = ["AsyncQuarry", "ProblemReceived", "Quarry"]
