"""Sources of images by name; adding one is adding a file and its entry here."""

from flcore.data.sources.base import RawDataset, RawSplit, Source
from flcore.data.sources.cifar import Cifar10, Cifar100
from flcore.data.sources.digits import Digits
from flcore.data.sources.imagefolder import ImageFolder
from flcore.data.sources.mnist import Emnist, FashionMnist, Mnist

SOURCES: dict[str, type[Source]] = {
    source.name: source for source in (Digits, Mnist, FashionMnist, Emnist, Cifar10, Cifar100, ImageFolder)
}

__all__ = ["SOURCES", "RawDataset", "RawSplit", "Source"]
