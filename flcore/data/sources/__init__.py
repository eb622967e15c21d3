"""Sources of images by name; adding one is adding a file and its entry here."""

from flcore.data.sources.base import RawDataset, RawSplit, Source
from flcore.data.sources.celeba import CelebA
from flcore.data.sources.cifar import Cifar10, Cifar100
from flcore.data.sources.digits import Digits
from flcore.data.sources.femnist import Femnist
from flcore.data.sources.imagefiles import ImageFiles
from flcore.data.sources.imagefolder import ImageFolder
from flcore.data.sources.mnist import Emnist, FashionMnist, Mnist
from flcore.data.sources.tinyimagenet import TinyImageNet
from flcore.data.sources.vireofood172 import VireoFood172

SOURCES: dict[str, type[Source]] = {
    source.name: source
    for source in (
        Digits,
        Mnist,
        FashionMnist,
        Emnist,
        Femnist,
        Cifar10,
        Cifar100,
        TinyImageNet,
        VireoFood172,
        CelebA,
        ImageFolder,
    )
}

__all__ = ["SOURCES", "ImageFiles", "RawDataset", "RawSplit", "Source"]
