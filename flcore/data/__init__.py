"""Data: where images come from, how they are prepared, augmented and divided among clients."""

from flcore.data.augment import Policy, augment, draw_augmentation
from flcore.data.dataset import Dataset, Meta, Split, prepare
from flcore.data.dividing import make_partition
from flcore.data.images import denormalise, normalise
from flcore.data.imbalance import Imbalance, minority_classes
from flcore.data.partition import ClientSplit, Partition
from flcore.data.partitioners import PARTITIONERS, Partitioner
from flcore.data.skew import Skew, skew
from flcore.data.sources import SOURCES, Source
from flcore.data.summary import summarise
from flcore.data.tasks import Schedule, new_classes, task_of_round

__all__ = [
    "PARTITIONERS",
    "SOURCES",
    "ClientSplit",
    "Dataset",
    "Imbalance",
    "Meta",
    "Partition",
    "Partitioner",
    "Policy",
    "Schedule",
    "Skew",
    "Source",
    "Split",
    "augment",
    "denormalise",
    "draw_augmentation",
    "make_partition",
    "minority_classes",
    "new_classes",
    "normalise",
    "prepare",
    "skew",
    "summarise",
    "task_of_round",
]
