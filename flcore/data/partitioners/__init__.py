"""Partitioners by name; adding one is adding a file and its line here."""

from flcore.core.registry import Registry
from flcore.data.partitioners.base import Partitioner

PARTITIONERS: Registry[type[Partitioner]] = Registry(
    "partitioner",
    {
        "iid": "flcore.data.partitioners.simple:Iid",
        "dirichlet": "flcore.data.partitioners.dirichlet:Dirichlet",
        "classes_per_client": "flcore.data.partitioners.classes_per_client:ClassesPerClient",
        "dominant": "flcore.data.partitioners.simple:Dominant",
        "shards": "flcore.data.partitioners.simple:Shards",
        "ways_shots": "flcore.data.partitioners.ways_shots:WaysShots",
        "by_group": "flcore.data.partitioners.simple:ByGroup",
        "imported": "flcore.data.partitioners.imported:Imported",
    },
)
