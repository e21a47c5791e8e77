"""The store: every table and every statement, behind verbs. It is the queue, and all that processes share."""

from service.store.database import Store, Transaction
from service.store.values import (
    DeletionLease,
    JobRow,
    Lease,
    NewJob,
    PlanLease,
    PlannedUnit,
    PublishLease,
    TaskState,
    UnitCommit,
    UnitLease,
    UnitRow,
)

__all__ = [
    "DeletionLease",
    "JobRow",
    "Lease",
    "NewJob",
    "PlanLease",
    "PlannedUnit",
    "PublishLease",
    "Store",
    "TaskState",
    "Transaction",
    "UnitCommit",
    "UnitLease",
    "UnitRow",
]
