"""Partitioners by name; adding one is adding a file and its entry here."""

from flcore.data.partitioners.base import Assignment, Partitioner
from flcore.data.partitioners.by_group import ByGroup
from flcore.data.partitioners.classes_per_client import ClassesPerClient
from flcore.data.partitioners.dirichlet import Dirichlet
from flcore.data.partitioners.dominant import Dominant
from flcore.data.partitioners.iid import Iid
from flcore.data.partitioners.imported import Imported
from flcore.data.partitioners.shards import Shards
from flcore.data.partitioners.ways_shots import WaysShots

PARTITIONERS: dict[str, type[Partitioner]] = {
    partitioner.name: partitioner
    for partitioner in (Iid, Dirichlet, ClassesPerClient, Dominant, Shards, WaysShots, ByGroup, Imported)
}

__all__ = ["PARTITIONERS", "Assignment", "Partitioner"]
