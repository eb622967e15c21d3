"""Data: where images come from, how they are prepared, augmented and divided among clients."""

from flcore.data.augment import Policy, augment, draw_augmentation
from flcore.data.dataset import Dataset, Meta, Split, prepare
from flcore.data.images import denormalise, normalise
from flcore.data.partition import ClientSplit, Partition, make_partition
from flcore.data.partitioners import PARTITIONERS, Partitioner
from flcore.data.skew import Skew, skew
from flcore.data.sources import SOURCES, Source

__all__ = [
    "PARTITIONERS",
    "SOURCES",
    "ClientSplit",
    "Dataset",
    "Meta",
    "Partition",
    "Partitioner",
    "Policy",
    "Skew",
    "Source",
    "Split",
    "augment",
    "denormalise",
    "draw_augmentation",
    "make_partition",
    "normalise",
    "prepare",
    "skew",
]
