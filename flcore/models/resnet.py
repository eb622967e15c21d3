"""ResNet-18 and ResNet-50 with a stem for small images."""

from __future__ import annotations

import errno
import hashlib
import stat
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import nn

from flcore.core.errors import DataError, listed
from flcore.core.params import param
from flcore.io.files import given_path, read_tensors
from flcore.models.base import Backbone, ModelSpec

_LEFT_OUT = ("conv1.", "bn1.", "fc.")
"""Layers that stay random in FedProto's code, which GFPL follows; all others start from ImageNet weights."""


@dataclass(frozen=True)
class _ResNet(ModelSpec):
    """torchvision's network of this name (He et al., CVPR 2016) with random initial weights.

    ``projection_dim`` adds FedCSPC's two-layer projection before the head: e → e, ReLU, → d, e the length of the
    network's output (fedcspc.md section 2). With ``pretrained`` everything but the stem's convolution, its BatchNorm
    and the classifier starts from a file under torchvision's names (gfpl.md section 2), with ``stem: pretrained`` all
    but the classifier, as frozen features need; nothing is downloaded.
    """

    ENCODED: ClassVar[int]

    stem: Literal["small", "imagenet", "pretrained"] = param(
        "small", "small: 3×3 stride 1 for images of 28 to 64 pixels; pretrained: ImageNet's, from the file too"
    )
    projection_dim: int | None = param(None, "length d of a projection, which the head reads then; null: none", low=1)
    pretrained: str | None = param(
        None,
        "safetensors file with weights under torchvision's names, from which all but the stem's convolution, its "
        "BatchNorm and the classifier start; null: random",
    )
    pretrained_sha256: str | None = param(None, "SHA-256 that the file must have, in hexadecimal; null: any")

    def __post_init__(self) -> None:
        """Refuse a pretrained stem or a checksum without a file, and a malformed checksum."""
        if self.stem == "pretrained" and self.pretrained is None:
            raise ValueError("stem = pretrained: set pretrained, the file that has it")
        if self.pretrained_sha256 is not None:
            if self.pretrained is None:
                raise ValueError("pretrained_sha256 is given without pretrained, the file that has it")
            if len(self.pretrained_sha256) != 64 or set(self.pretrained_sha256.lower()) - set("0123456789abcdef"):
                raise ValueError("pretrained_sha256: expected 64 hexadecimal digits")

    @property
    def pretrained_file(self) -> PretrainedFile | None:
        """The file of initial weights; None: random weights."""
        return None if self.pretrained is None else PretrainedFile(given_path(self.pretrained), self.pretrained_sha256)

    def build(self, shape: tuple[int, int, int], num_classes: int) -> Backbone:
        """Assemble the network; raise DataError if pretrained weights are missing, damaged, or another network's."""
        from torchvision import models  # seconds to import, and only these models need it

        network = getattr(models, self.name)(weights=None)
        if self.stem == "small":
            network.conv1 = nn.Conv2d(shape[0], 64, 3, stride=1, padding=1, bias=False)
            network.maxpool = nn.Identity()
        elif shape[0] != 3:
            network.conv1 = nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False)
        network.fc = nn.Identity()
        if self.pretrained_file is not None:
            left_out = ("fc.",) if self.stem == "pretrained" else _LEFT_OUT
            load_pretrained(network, self.pretrained_file, left_out)
        encoded, width = self.ENCODED, self.projection_dim or self.ENCODED
        projection: nn.Module = nn.Identity()
        if self.projection_dim is not None:
            projection = nn.Sequential(nn.Linear(encoded, encoded), nn.ReLU(), nn.Linear(encoded, width))
        # After the ImageNet stem maps of small images have a few pixels, and nothing is gained.
        return Backbone(network, projection, nn.Linear(width, num_classes), channels_last=self.stem == "small")


@dataclass(frozen=True)
class ResNet18(_ResNet, name="resnet18", ENCODED=512):
    """ResNet-18, feature 512; FedPG, FedCSPC, FedMLP and GFPL on CIFAR.

    The small stem (3×3, stride 1, no pooling) has 11,173,962 parameters for 10 classes, the ImageNet stem 11,181,642
    (data.md section 1.4).
    """


@dataclass(frozen=True)
class ResNet50(_ResNet, name="resnet50", ENCODED=2048):
    """ResNet-50, feature 2048; FedPG on CIFAR-100.

    23,705,252 parameters with the small stem for 100 classes (fedpg.md section 2).
    """


@dataclass(frozen=True)
class PretrainedFile:
    """A safetensors file, and the SHA-256 in hexadecimal that it must have (None: any)."""

    path: Path
    sha256: str | None = None

    def digest(self) -> str:
        """Return the file's SHA-256; raise DataError if the file is missing, or has another SHA-256 than required."""
        try:
            facts = self.path.stat()
            if not stat.S_ISREG(facts.st_mode):  # a pipe would be waited for, a device read without end
                raise OSError(errno.EINVAL, "not a file")
            found = _digest(self.path, (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino))
        except OSError as error:
            raise DataError(
                f"model.pretrained = {self.path}: cannot be read ({error.strerror}); name a safetensors file, or null"
            ) from error
        if self.sha256 is not None and found != self.sha256.lower():
            raise DataError(
                f"model.pretrained = {self.path}: its SHA-256 is {found}, not pretrained_sha256 = {self.sha256}; it is "
                "another file, or damaged"
            )
        return found


@cache
def _digest(path: Path, state: tuple[int, ...]) -> str:
    # Asked for whenever a run is named; size, times and inode say whether it is the file of before.
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@torch.no_grad()
def load_pretrained(network: nn.Module, file: PretrainedFile, left_out: tuple[str, ...]) -> None:
    """Copy a file's values into a network's parameters and buffers, in place: all of them, or none and an error.

    The file has a tensor for each name but BatchNorm's counters of batches and names that begin with ``left_out``,
    which are not loaded and may have any shape.

    Raises:
        DataError: the file is missing or damaged, has another SHA-256, or is of another network.
    """
    file.digest()
    given, _ = read_tensors(file.path, "name another file in model.pretrained, or null")
    given = {name: tensor for name, tensor in given.items() if not name.startswith(left_out)}
    own = {name: tensor for name, tensor in network.state_dict().items() if not name.startswith(left_out)}
    missing = [name for name in own if name not in given and not name.endswith("num_batches_tracked")]
    unknown = [name for name in given if name not in own]
    if missing or unknown:
        faults = [f"{what} {listed(names, 3)}" for what, names in (("lacks", missing), ("has", unknown)) if names]
        raise DataError(f"model.pretrained = {file.path}: is of another network: it {' and '.join(faults)}")
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise DataError(
                f"model.pretrained = {file.path}: {name} has shape {tuple(tensor.shape)}, the model's "
                f"{tuple(own[name].shape)}: it is of another network"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise DataError(f"model.pretrained = {file.path}: {name} holds values that are not finite")
    for name, tensor in given.items():
        own[name].copy_(tensor)
