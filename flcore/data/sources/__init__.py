"""Sources of images by name; adding one is adding a file and its line here."""

from flcore.core.registry import Registry
from flcore.data.sources.base import Source

SOURCES: Registry[type[Source]] = Registry(
    "dataset",
    {
        "digits": "flcore.data.sources.digits:Digits",
        "mnist": "flcore.data.sources.mnist:Mnist",
        "fashionmnist": "flcore.data.sources.mnist:FashionMnist",
        "emnist": "flcore.data.sources.mnist:Emnist",
        "femnist": "flcore.data.sources.femnist:Femnist",
        "cifar10": "flcore.data.sources.cifar:Cifar10",
        "cifar100": "flcore.data.sources.cifar:Cifar100",
        "tinyimagenet": "flcore.data.sources.on_request:TinyImageNet",
        "vireofood172": "flcore.data.sources.on_request:VireoFood172",
        "celeba": "flcore.data.sources.on_request:CelebA",
        "imagefolder": "flcore.data.sources.imagefolder:ImageFolder",
        "arrays": "flcore.data.sources.arrays:Arrays",
        "huggingface": "flcore.data.sources.huggingface:HuggingFace",
    },
)
