"""The store: every table and every statement, behind verbs. It is the queue, and all that processes share."""

from service.store.store import Store
from service.store.values import (
    JobRow,
    PlanLease,
    PlannedUnit,
    PublishLease,
    UnitCommit,
    UnitLease,
    UnitRow,
)

__all__ = [
    "JobRow",
    "PlanLease",
    "PlannedUnit",
    "PublishLease",
    "Store",
    "UnitCommit",
    "UnitLease",
    "UnitRow",
]
