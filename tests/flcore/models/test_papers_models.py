"""Networks of the papers' larger experiments: every parameter counted by hand, a head of two layers, given weights."""

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
from flcore.models import MODELS, Backbone, build_model
from flcore.models.base import HiddenHead
from flcore.models.resnet import PretrainedFile, load_pretrained


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def parts(model: Backbone) -> list[int]:
    return [count(part) for part in (model.encoder, model.projection, model.head)]


def conv(inputs: int, outputs: int, side: int, bias: bool = True) -> int:
    return (inputs * side**2 + bias) * outputs


def linear(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


def test_celeba_cnn() -> None:
    """448 + 32, 4,640 + 64, 18,496 + 128, 64·32 + 32 = 2,080, and 66: 25,954 (fedpa.md section 2).

    84 pixels: 42, pooled 21, 11, pooled 5, 3, pooled 1: 64 values.
    """
    model = build_model(MODELS["celeba_cnn"](), (3, 84, 84), 2)
    convolutions = conv(3, 16, 3) + 2 * 16 + conv(16, 32, 3) + 2 * 32 + conv(32, 64, 3) + 2 * 64
    assert parts(model) == [convolutions + linear(64, 32), 0, linear(32, 2)]
    assert sum(parts(model)) == 25_954
    assert model.features(torch.zeros(2, 3, 84, 84)).shape == (2, 32)
    with pytest.raises(ValueError, match=r"images of 28x28 are too small .* set data\.size to 84"):
        build_model(MODELS["celeba_cnn"](), (1, 28, 28), 2)


def test_femnist_cnn() -> None:
    """100 + 5,020 + 841,050 + 3,162 = 849,332 (gfpl.md section 2). 128 pixels: 126, 63, 59, 29: 20·29² = 16,820."""
    model = build_model(MODELS["femnist_cnn"](), (1, 128, 128), 62)
    assert parts(model) == [conv(1, 10, 3) + conv(10, 20, 5) + linear(16_820, 50), 0, linear(50, 62)]
    assert sum(parts(model)) == 849_332


def test_fedpgs_small_network() -> None:
    """Parameters and running statistics, as fedpg.md counts them: 38,474 and 106,058 (its section 11).

    8 pixels, halved once: 32·4² = 512 values; 28, halved twice: 32·7² = 1,568.
    """
    for first_stride, size, values, published in ((1, 8, 512, 38_474), (2, 28, 1568, 106_058)):
        model = build_model(MODELS["fedpg_cnn"](first_stride=first_stride), (1, size, size), 10)
        encoder = conv(1, 16, 3) + 2 * 16 + conv(16, 32, 3) + 2 * 32 + linear(values, 64)
        assert parts(model) == [encoder, 0, linear(64, 10)]
        statistics = sum(b.numel() for b in model.buffers() if b.is_floating_point())
        assert (statistics, count(model) + statistics) == (2 * (16 + 32), published)
        assert model.features(torch.randn(4, 1, size, size)).min() == 0  # behind a ReLU


def test_convnet5() -> None:
    """Five blocks of (25·in + 1)·out and 2·out, 64 pixels halved five times: 2²·128 = 512 (fedpg.md section 2)."""
    model = build_model(MODELS["convnet5"](), (1, 64, 64), 62)
    blocks = [(1, 32), (32, 64), (64, 64), (64, 128), (128, 128)]
    encoder = sum(conv(inputs, outputs, 5) + 2 * outputs for inputs, outputs in blocks)
    assert parts(model) == [encoder, 0, linear(512, 2048) + linear(2048, 62)]
    assert (encoder, sum(parts(model))) == (770_048, 1_947_710)
    assert (model.feature_dim, model.encoded_dim) == (512, 512)
    with pytest.raises(ValueError, match=r"images of 28x28 are too small .* set data\.size to 64"):
        build_model(MODELS["convnet5"](), (1, 28, 28), 62)
    plain = build_model(MODELS["convnet5"](hidden=0), (1, 64, 64), 62)
    assert parts(plain) == [encoder, 0, linear(512, 62)]


def test_resnet50() -> None:
    """Blocks of 1×1, 3×3 and 1×1 convolutions without bias, each normalised; 23.71 M for 100 classes (fedpg.md 2)."""

    def block(inputs: int, width: int, first: bool) -> int:
        outputs = 4 * width
        main = conv(inputs, width, 1, False) + conv(width, width, 3, False) + conv(width, outputs, 1, False)
        norms = 2 * (width + width + outputs)
        return main + norms + (conv(inputs, outputs, 1, False) + 2 * outputs if first else 0)

    encoder, inputs = conv(3, 64, 3, False) + 2 * 64, 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(blocks):
            encoder += block(inputs, width, first=number == 0)
            inputs = 4 * width
    model = build_model(MODELS["resnet50"](), (3, 32, 32), 100)
    assert parts(model) == [encoder, 0, linear(2048, 100)]
    assert (sum(parts(model)), model.feature_dim) == (23_705_252, 2048)


def test_a_hidden_head_by_hand() -> None:
    """x = (1, -2): hidden units ReLU(1 + 2 - 1, -1) = (2, 0), logits (2·3 + 1, 2·0 + 5)."""
    head = HiddenHead(2, 2, 2)
    with torch.no_grad():
        head.hidden.weight.copy_(torch.tensor([[1.0, -1.0], [-1.0, 0.0]]))
        head.hidden.bias.copy_(torch.tensor([-1.0, 0.0]))
        head.weight.copy_(torch.tensor([[3.0, 9.0], [0.0, 9.0]]))
        head.bias.copy_(torch.tensor([1.0, 5.0]))
    assert head(torch.tensor([[1.0, -2.0]])).tolist() == [[7.0, 5.0]]


def test_a_hidden_head_is_widened_behind_its_hidden_layer() -> None:
    """The first outputs say what they said; everything but the additional ones starts the same."""
    spec, shape = MODELS["convnet5"](hidden=7), (1, 32, 32)
    narrow, wide = build_model(spec, shape, 3).eval(), build_model(spec, shape, 3, outputs=5).eval()
    features = torch.randn(2, narrow.feature_dim, generator=torch.Generator().manual_seed(0))
    assert wide.classify(features).shape == (2, 5)
    # Products of another width may go through another kernel: the last bits are the processor's.
    torch.testing.assert_close(wide.classify(features)[:, :3], narrow.classify(features))
    assert [name for name, _ in wide.named_parameters()] == [name for name, _ in narrow.named_parameters()]


@pytest.mark.parametrize("method", [{"name": "creff"}, {"name": "lda_head"}])
def test_methods_that_need_a_linear_head_say_so(lab: Any, method: dict[str, Any]) -> None:
    sized = {"data": {"name": "digits", "size": 32}}
    assert Config.from_mapping({**sized, "model": {"name": "convnet5"}}).model_spec.name == "convnet5"
    tiny = lab.toy_dataset([[0] * 1024, [1] * 1024], [0, 1], None, None)
    with pytest.raises(
        ConfigError, match=r"^model\.name = convnet5: its head has a hidden layer, and .*model\.hidden=0"
    ):
        wanted(lab, tiny, {"name": "convnet5"}, method).new_module()
    assert type(wanted(lab, tiny, {"name": "convnet5", "hidden": 0}, method).new_module().head) is nn.Linear


def wanted(lab: Any, dataset: Any, model: dict[str, Any], method: dict[str, Any]) -> Any:
    """An experiment whose images are 32×32."""
    from dataclasses import replace

    splits = [replace(split, images=split.images.reshape(-1, 1, 32, 32)) for split in (dataset.train, dataset.test)]
    shaped = type(dataset)(*splits, replace(dataset.meta, shape=(1, 32, 32)))
    return lab.experiment(shaped, lab.by_hand(shaped, [[0], [1]], [[0, 1]] * 2), model=model, method=method)


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
