"""Networks that start from a file: what fits, what is refused, and what a run is named by."""

from __future__ import annotations

import hashlib
import os
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flcore.config.schema import Config
from flcore.core.errors import ConfigError, DataError
from flcore.methods import METHODS
from flcore.models import MODELS, build_model
from flcore.models.resnet import PretrainedFile, load_pretrained


class Network(nn.Module):
    """What stands for torchvision's: a stem, a layer with statistics, a classifier that is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.layer, self.fc = nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Identity()


def given(path: Path, **changes: torch.Tensor | None) -> PretrainedFile:
    """A file for :class:`Network` as ImageNet's: another stem, a classifier, no counter of batches."""
    values: dict[str, torch.Tensor | None] = {
        "conv1.weight": torch.ones(9, 9), "fc.bias": torch.ones(1000), "layer.weight": torch.tensor([2.0, 3.0]),
        "layer.bias": torch.tensor([4.0, 5.0]), "layer.running_mean": torch.tensor([6.0, 7.0]),
        "layer.running_var": torch.tensor([8.0, 9.0]), **changes,
    }  # fmt: skip
    save_file({name: value for name, value in values.items() if value is not None}, path)
    return PretrainedFile(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer.bias": None}, r"is of another network: it lacks layer\.bias$"),
        ({"layer2.bias": torch.ones(1)}, r"is of another network: it has layer2\.bias$"),
        ({"layer.bias": torch.ones(3)}, r"layer\.bias has shape \(3,\), the model's \(2,\)"),
        ({"layer.bias": torch.tensor([1.0, torch.nan])}, r"layer\.bias holds values that are not finite"),
    ],
)
def test_a_file_of_another_network_is_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    """Nothing of the network changes."""
    network = Network()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with pytest.raises(DataError, match=rf"^model\.pretrained = {tmp_path}/w\.safetensors: {message}"):
        load_pretrained(network, given(tmp_path / "w.safetensors", **changes), ("conv1.", "fc."))
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


def test_files_that_change_names_are_told_apart(tmp_path: Path) -> None:
    """Of one size and one time, as an unpacked archive has them."""
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    for path, value in ((first, 1.0), (second, 2.0)):
        given(path, **{"layer.bias": torch.full((2,), value)})
        os.utime(path, ns=(0, 0))
    one, two = PretrainedFile(first).digest(), PretrainedFile(second).digest()
    first.rename(tmp_path / "between")
    second.rename(first)
    (tmp_path / "between").rename(second)
    assert (PretrainedFile(first).digest(), PretrainedFile(second).digest()) == (two, one) != (one, two)


def test_the_checksum_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    digest = hashlib.sha256(given(path).path.read_bytes()).hexdigest()
    assert PretrainedFile(path, digest.upper()).digest() == PretrainedFile(path).digest() == digest
    with pytest.raises(DataError, match=rf"its SHA-256 is {digest}, not pretrained_sha256 = 00"):
        PretrainedFile(path, "0" * 64).digest()
    with pytest.raises(DataError, match=r"^model\.pretrained = nowhere: cannot be read \(No such file"):
        PretrainedFile(Path("nowhere")).digest()
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(DataError, match=r"name another file in model\.pretrained"):
        load_pretrained(Network(), PretrainedFile(tmp_path / "text"), ())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pretrained_sha256": "0" * 64}, "pretrained_sha256 is given without pretrained"),
        ({"pretrained": "w", "pretrained_sha256": "0" * 63}, "pretrained_sha256: expected 64 hexadecimal digits"),
        ({"pretrained": "w", "pretrained_sha256": "g" * 64}, "pretrained_sha256: expected 64 hexadecimal digits"),
    ],
)
def test_no_checksum(values: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_mapping({"model": {"name": "resnet18", **values}})


def test_a_run_is_named_by_what_is_in_the_file(tmp_path: Path) -> None:
    """Not by its place, nor by whether its checksum was written down; without one by nothing."""
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    digest = given(first).digest()
    given(second)

    def named(**values: str) -> Any:
        return Config.from_mapping({"model": {"name": "resnet18", **values}}).identity()["model"]

    assert named(pretrained=str(first))["pretrained"] == digest
    assert named(pretrained=str(first)) == named(pretrained=str(second), pretrained_sha256=digest)
    given(second, **{"layer.bias": torch.zeros(2)})
    os.utime(second, (0, 0))  # written at another time, however fast this was
    assert named(pretrained=str(second)) != named(pretrained=str(first))
    assert named()["pretrained"] is None


@pytest.mark.slow
def test_a_resnet_starts_from_a_file(tmp_path: Path) -> None:
    """All but stem, first BatchNorm and classifier, from torchvision's own names (gfpl.md section 2)."""
    from torchvision.models import resnet18

    theirs = resnet18(weights=None).state_dict()
    save_file(theirs, tmp_path / "w.safetensors")
    spec = MODELS["resnet18"](pretrained=str(tmp_path / "w.safetensors"), stem="imagenet")
    ours, plain = (
        build_model(one, (3, 32, 32), 10).state_dict() for one in (spec, MODELS["resnet18"](stem="imagenet"))
    )
    for name, value in theirs.items():
        own = ours.get(f"encoder.{name}")
        if name.startswith(("conv1.", "bn1.")):
            assert torch.equal(own, plain[f"encoder.{name}"])
        elif not name.startswith("fc."):
            assert torch.equal(own, value), name
    assert torch.equal(ours["head.weight"], plain["head.weight"])
    assert prod(ours["encoder.conv1.weight"].shape) == 9_408


@pytest.mark.slow
def test_every_method_starts_from_the_file(tmp_path: Path) -> None:
    """All but ProtoLDA and its blocks, which train no network."""
    from torchvision.models import resnet18

    theirs = resnet18(weights=None).state_dict()
    save_file(theirs, tmp_path / "w.safetensors")
    model = {"name": "resnet18", "pretrained": str(tmp_path / "w.safetensors"), "projection_dim": 8}
    for name in sorted({*METHODS} - {"protolda", "protolda_blocks"}):
        config = Config.from_mapping({"method": {"name": name}, "model": model})
        outputs, extra = config.method.num_outputs(10), config.method.extra_layers
        weights = build_model(config.model_spec, (3, 32, 32), 10, 0, outputs, extra).state_dict()
        assert torch.equal(weights["encoder.layer1.0.conv1.weight"], theirs["layer1.0.conv1.weight"]), name


def test_weights_of_a_file(tmp_path: Path) -> None:
    network, untouched = Network(), Network()
    untouched.load_state_dict(network.state_dict())
    load_pretrained(network, given(tmp_path / "w.safetensors"), ("conv1.", "fc."))
    assert network.layer.weight.tolist() == [2, 3] and network.layer.bias.tolist() == [4, 5]
    assert network.layer.running_mean.tolist() == [6, 7] and network.layer.running_var.tolist() == [8, 9]
    assert torch.equal(network.conv1.weight, untouched.conv1.weight)
