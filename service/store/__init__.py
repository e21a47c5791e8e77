"""The store: every table and statement, behind functions ("verbs"). It is the queue and all shared state."""

from service.store.database import Store, Transaction
from service.store.values import (
    HOME,
    JobRow,
    Lease,
    NewJob,
    PlanLease,
    PlannedUnit,
    PublishLease,
    StoreLease,
    TaskState,
    UnitCommit,
    UnitFiles,
    UnitLease,
    UnitRow,
    WebhookLease,
)

__all__ = [
    "HOME",
    "JobRow",
    "Lease",
    "NewJob",
    "PlanLease",
    "PlannedUnit",
    "PublishLease",
    "Store",
    "StoreLease",
    "TaskState",
    "Transaction",
    "UnitCommit",
    "UnitFiles",
    "UnitLease",
    "UnitRow",
    "WebhookLease",
]
