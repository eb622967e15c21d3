"""Models: their parameters counted by hand, the feature tap, seeds, pooling, and dropout whose noise is an argument."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from flcore.models import MODELS, Backbone, build_model, extract_weights, load_weights
from flcore.models.base import HiddenHead, MaxPool, dropout, laid_out, max_pool, snapshot

GREY, COLOUR = (1, 28, 28), (3, 32, 32)
CONVNET5 = 896 + 51_392 + 102_592 + 205_184 + 409_984  # its encoder
SHAPES = {"celeba_cnn": (3, 84, 84)}  # what does not read small images


def make(name: str, shape: tuple[int, int, int], num_classes: int = 10, seed: int = 0, **options: Any) -> Backbone:
    return build_model(MODELS[name](**options), shape, num_classes, seed)


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def parts(module: Backbone) -> tuple[int, ...]:
    return tuple(map(count, (module.encoder, module.projection, module.head)))


def images_of(shape: tuple[int, ...], number: int = 4) -> torch.Tensor:
    return torch.rand(number, *shape, generator=torch.Generator().manual_seed(0))


def conv(inputs: int, outputs: int, side: int, bias: bool = True) -> int:
    return (inputs * side**2 + bias) * outputs


def linear(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


@pytest.mark.parametrize(
    ("name", "options", "shape", "classes", "expected", "published"),
    [
        # (9+1)·6 + 12 + (54+1)·16 + 32 = 60 + 12 + 880 + 32 = 984; 784·32 + 32 = 25,120; head 330 or 26·33 = 858
        ("fedgen_cnn", {}, GREY, 10, (984 + 25_120, 0, 330), 26_434),  # fedpa.md 2
        ("fedgen_cnn", {}, GREY, 26, (984 + 25_120, 0, 858), 26_962),
        ("fedproto_cnn", {}, GREY, 10, (260 + 5_020 + 16_050, 0, 510), 21_840),  # baselines.md 15
        ("fedcspc_cnn", {}, COLOUR, 10, (61_156, 28_900, 2_570), 92_626),  # fedcspc.md 2
        ("fedavg_cnn", {}, GREY, 10, (832 + 51_264 + 524_800, 0, 5_130), 582_026),
        ("fedavg_cnn", {"hidden": 0}, GREY, 10, (832 + 51_264, 0, 10_250), 62_346),
        ("pixels", {}, GREY, 10, (0, 0, 7_850), 7_850),
        ("fedmlp_cnn", {}, GREY, 10, (260 + 5_020 + 5_792 + 6_450, 0, 510), 18_032),  # fedmlp.md, fact 14
        # (27+1)·32 = 896; (288+1)·64 = 18,496; 14²·64 = 12,544
        ("pfl_cnn", {}, COLOUR, 10, (896 + 18_496, linear(12_544, 128), linear(128, 10)), 1_626_442),
        # 448 + 32, 4,640 + 64, 18,496 + 128; 84 pixels: 42, pooled 21, 11, pooled 5, 3, pooled 1: 64 (fedpa.md 2)
        ("celeba_cnn", {}, (3, 84, 84), 2, (480 + 4_704 + 18_624 + linear(64, 32), 0, linear(32, 2)), 25_954),
        # 128 pixels: 126, 63, 59, 29: 20·29² = 16,820 (gfpl.md 2)
        ("femnist_cnn", {}, (1, 128, 128), 62, (100 + 5_020 + linear(16_820, 50), 0, linear(50, 62)), 849_332),
        # Five blocks of (25·in + 1)·out and 2·out, 64 pixels halved five times: 2²·128 = 512 (fedpg.md 2)
        ("convnet5", {}, (1, 64, 64), 62, (CONVNET5, 0, linear(512, 2048) + linear(2048, 62)), 1_947_710),
        ("convnet5", {"hidden": 0}, (1, 64, 64), 62, (CONVNET5, 0, linear(512, 62)), 801_854),
        ("resnet18", {}, COLOUR, 10, (11_168_832, 0, 5_130), 11_173_962),  # data.md 1.4
        ("resnet18", {"stem": "imagenet"}, COLOUR, 10, (11_176_512, 0, 5_130), 11_181_642),
        # 11.59 M, as fedcspc.md, section 3, has it for CIFAR-100
        ("resnet18", {"projection_dim": 256}, COLOUR, 100,
         (11_168_832, linear(512, 512) + linear(512, 256), linear(256, 100)), 11_588_516),
    ],
)  # fmt: skip
def test_parameters_of_encoder_projection_and_head(
    name: str, options: Any, shape: Any, classes: int, expected: tuple[int, int, int], published: int
) -> None:
    module = make(name, shape, classes, **options)
    assert parts(module) == expected
    assert sum(expected) == published == extract_weights(module).num_parameters


def test_batchnorm_statistics_of_resnet() -> None:
    """9,600 running means and variances (fedpg.md): 4,800 normalised channels, twice; 20 layers count batches."""
    buffers = extract_weights(make("resnet18", COLOUR)).buffers
    assert sum(b.numel() for b in buffers.values() if b.is_floating_point()) == 9_600
    assert sum(not b.is_floating_point() for b in buffers.values()) == 20


@pytest.mark.parametrize(
    ("name", "shape", "options", "dim"),
    [
        ("fedgen_cnn", GREY, {"feature_dim": 7}, 7),
        ("fedgen_cnn", (3, 17, 17), {}, 32),
        ("fedproto_cnn", GREY, {}, 50),
        ("fedmlp_cnn", GREY, {}, 50),  # 28 - 4 = 24, 12, 12 - 4 = 8, 4, 4 - 2 = 2: 32·2·2 = 128 values
        ("fedmlp_cnn", COLOUR, {}, 50),  # 28, 14, 10, 5, 3: 288
        ("fedmlp_cnn", (1, 24, 24), {}, 50),  # 20, 10, 6, 3, 1: 32
        ("fedcspc_cnn", COLOUR, {"projection_dim": 84}, 84),
        ("fedcspc_cnn", GREY, {}, 256),
        ("resnet18", (1, 28, 28), {}, 512),
        ("resnet18", (1, 32, 32), {"stem": "imagenet"}, 512),
    ],
)
def test_the_feature_is_what_the_head_reads(name: str, shape: Any, options: Any, dim: int) -> None:
    module = make(name, shape, 5, **options).eval()
    features, logits = module(images_of(shape, 3))
    assert (module.feature_dim, module.num_classes) == (dim, 5)
    assert features.shape == (3, dim)
    assert torch.allclose(logits, features @ module.head.weight.T + module.head.bias, atol=1e-5)
    assert {name.split(".")[0] for name, _ in module.named_parameters()} <= {"encoder", "projection", "head"}


@pytest.mark.parametrize(
    ("name", "shape", "cure"),
    [
        ("fedproto_cnn", (1, 12, 12), "28 or 32"),
        ("fedcspc_cnn", (3, 12, 12), "28 or 32"),
        ("fedmlp_cnn", (1, 16, 16), "28 or 32"),  # 16 - 4 = 12, 6, 2, 1: nothing is left for the third convolution
        ("celeba_cnn", GREY, "84"),
        ("convnet5", GREY, "64"),
        ("pfl_cnn", GREY, "32"),  # of no other size
    ],
)
def test_images_that_do_not_fit_are_refused_with_a_cure(name: str, shape: Any, cure: str) -> None:
    side = shape[-1]
    with pytest.raises(ValueError, match=rf"images of {side}x{side} (are too|do not fit) .* set data\.size to {cure}"):
        make(name, shape)


def test_the_run_names_the_model_that_cannot_read_the_images(lab: Any) -> None:
    toy = lab.toy_dataset([[1, 2], [3, 4]], [0, 1], None, None)
    with pytest.raises(ConfigError, match=r"^model\.name = fedproto_cnn: images of 1x2 are too small"):
        lab.experiment(toy, lab.by_hand(toy, [[0], [1]]), model={"name": "fedproto_cnn"})


@pytest.mark.parametrize("name", ["fedgen_cnn", "fedproto_cnn", "fedcspc_cnn"])
def test_initial_weights_are_a_function_of_the_seed(name: str) -> None:
    first, again, other = (extract_weights(make(name, COLOUR, seed=seed)).params for seed in (4, 4, 5))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(
        torch.equal(first[key], other[key]) for key in first if "encoder.1." not in key and "encoder.4." not in key
    )


def test_every_run_seed_has_its_own_initial_weights(lab: Any) -> None:
    weights = [lab.experiment(seed=seed).setting.initial.params["head.weight"] for seed in (0, 1, 2)]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert torch.equal(
        weights[0], lab.experiment(seed=0, method__name="fedproto").setting.initial.params["head.weight"]
    )


def test_building_does_not_touch_the_global_generator() -> None:
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    for name in MODELS.keys() - {"resnet50"}:
        make(name, SHAPES.get(name, COLOUR))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("resnet")])
def test_a_pass_draws_no_random_numbers(name: str) -> None:
    shape = SHAPES.get(name, COLOUR)
    module = make(name, shape).train()
    before = torch.random.get_rng_state()
    noise = {
        site: torch.rand(4, *drops, generator=torch.Generator().manual_seed(1))
        for site, drops in module.dropout_shapes.items()
    }
    module(torch.zeros(4, *shape), noise or None)
    assert torch.equal(before, torch.random.get_rng_state())


def test_dropout_by_hand() -> None:
    """Rate 0.5: noise below 0.5 drops, the rest doubles; noise of a channel covers its pixels; 0.5 itself stays."""
    values = torch.tensor([[1.0, 2.0, 3.0]])
    assert dropout(values, torch.tensor([[0.4, 0.5, 0.9]]), 0.5).tolist() == [[0.0, 4.0, 6.0]]
    maps = torch.ones(1, 2, 2, 2)
    assert dropout(maps, torch.tensor([[0.1, 0.7]]), 0.5).tolist() == [[[[0, 0], [0, 0]], [[2, 2], [2, 2]]]]
    assert dropout(values, torch.rand(1, 3), 0.0).tolist() == values.tolist()


def test_dropout_network_hears_its_noise_and_nothing_else() -> None:
    module, images = make("fedproto_cnn", GREY), images_of(GREY)
    kept = {site: torch.ones(4, *shape) for site, shape in module.dropout_shapes.items()}
    gone = {site: torch.zeros(4, *shape) for site, shape in module.dropout_shapes.items()}
    # Without noise: the same in both modes and twice; that is evaluation.
    assert torch.equal(module.train()(images)[1], module.eval()(images)[1])
    assert torch.equal(module(images)[1], module(images)[1])
    # All features dropped: the head's bias alone. All kept: the head reads twice the feature.
    features = module.features(images)
    assert torch.equal(module.classify(features, gone), module.head.bias.expand(4, -1))
    assert torch.allclose(
        module.classify(features, kept), 2 * features @ module.head.weight.T + module.head.bias, atol=1e-5
    )
    # Channels dropped: the linear layer reads zeros, ReLU(bias); the feature itself (the tap) is never dropped.
    linear = list(module.encoder.children())[2]
    assert torch.allclose(module.features(images, gone), linear.bias.clamp_min(0).expand(4, -1))
    assert not torch.equal(module.features(images, kept), features)


def test_snapshots_are_copies_and_load_back() -> None:
    module = make("fedgen_cnn", GREY).train()
    weights = extract_weights(module)
    before = {name: tensor.clone() for name, tensor in (weights.params | weights.buffers).items()}
    module(torch.rand(4, *GREY))
    with torch.no_grad():
        module.head.bias.add_(1)
    assert all(torch.equal(before[name], tensor) for name, tensor in (weights.params | weights.buffers).items())
    assert not torch.equal(module.state_dict()["encoder.1.running_mean"], before["encoder.1.running_mean"])
    load_weights(module, weights)
    state = module.state_dict()
    assert set(state) == set(before)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    with pytest.raises(KeyError):
        load_weights(module, type(weights)({"tail.weight": torch.zeros(1)}))


@pytest.mark.parametrize(
    ("name", "shape", "options", "changes"),
    [
        ("celeba_cnn", (3, 84, 84), {}, True),
        ("convnet5", (1, 64, 64), {}, True),
        pytest.param("resnet18", COLOUR, {}, True, marks=pytest.mark.slow),
        pytest.param("resnet18", COLOUR, {"stem": "imagenet"}, False, marks=pytest.mark.slow),
        ("fedgen_cnn", GREY, {}, False),
    ],
)
def test_where_channels_lie_changes_nothing_but_speed(name: str, shape: Any, options: Any, changes: bool) -> None:
    """Gradients and running statistics agree, messages are contiguous, and a GPU's module stays as it is."""
    images = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for device in ("cuda", "cpu"):  # on whose account it is laid out; it is computed here
        module = laid_out(make(name, shape, **options).double(), device)
        kernels = [tensor for tensor in module.parameters() if tensor.ndim == 4]
        assert (not all(kernel.is_contiguous() for kernel in kernels)) == (changes and device == "cpu")
        _, logits = module.train()(images)
        grads = torch.autograd.grad(logits.square().sum(), list(module.parameters()))
        own = snapshot(module)
        assert all(tensor.is_contiguous() for tensor in own.values.values())
        found.append([logits.detach(), *grads, *own.buffers.values()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-9)


def test_every_model_can_be_configured() -> None:
    for name in MODELS:
        spec = Config.from_mapping({"model": {"name": name}}).model_spec
        shape = SHAPES.get(name, COLOUR)
        module = build_model(spec, shape, 4).eval()
        encoded = module.encode(torch.zeros(2, *shape))
        assert encoded.shape == (2, module.encoded_dim)  # what a projection reads
        assert module.classify(module.project(encoded)).shape == (2, 4)


def test_fedpgs_small_network() -> None:
    """Parameters and running statistics, as fedpg.md counts them: 38,474 and 106,058 (its section 11).

    8 pixels, halved once: 32·4² = 512 values; 28, halved twice: 32·7² = 1,568.
    """
    for first_stride, size, values, published in ((1, 8, 512, 38_474), (2, 28, 1568, 106_058)):
        model = build_model(MODELS["fedpg_cnn"](first_stride=first_stride), (1, size, size), 10)
        encoder = conv(1, 16, 3) + 2 * 16 + conv(16, 32, 3) + 2 * 32 + linear(values, 64)
        assert parts(model) == (encoder, 0, linear(64, 10))
        statistics = sum(b.numel() for b in model.buffers() if b.is_floating_point())
        assert (statistics, count(model) + statistics) == (2 * (16 + 32), published)
        assert model.features(torch.randn(4, 1, size, size)).min() == 0  # behind a ReLU


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
    assert parts(model) == (encoder, 0, linear(2048, 100))
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
    splits = [replace(split, images=split.images.reshape(-1, 1, 32, 32)) for split in (dataset.train, dataset.test)]
    shaped = type(dataset)(*splits, replace(dataset.meta, shape=(1, 32, 32)))
    return lab.experiment(shaped, lab.by_hand(shaped, [[0], [1]], [[0, 1]] * 2), model=model, method=method)


def test_pfls_dropout_behind_the_pooling_and_in_front_of_the_head() -> None:
    """Noise of 0 drops everything: the maps leave the hidden layer's bias, the features leave the head's."""
    model, images = make("pfl_cnn", COLOUR), images_of(COLOUR, 2)
    assert not dict(model.named_buffers())
    kept = {site: torch.ones(2, *shape) for site, shape in model.dropout_shapes.items()}
    gone = {site: torch.zeros(2, *shape) for site, shape in model.dropout_shapes.items()}
    assert torch.equal(model.classify(model.features(images), gone), model.head.bias.expand(2, 10))
    without_maps = model.features(images, {"maps": gone["maps"], "features": kept["features"]})
    assert torch.allclose(without_maps, model.projection[0].bias.relu().expand(2, 128))
    # What stays is scaled by 1 / (1 - rate): 4/3 behind the pooling, 2 in front of the head.
    assert torch.allclose(model.encode(images, kept), model.encode(images) * 4 / 3)
    features = model.features(images)
    doubled = (model.classify(features, kept) - model.head.bias) / (model.classify(features) - model.head.bias)
    assert torch.allclose(doubled, torch.full((2, 10), 2.0), atol=1e-3)


def test_glorot_weights() -> None:
    """Uniform within sqrt(6 / (in + out)): for the hidden layer sqrt(6 / 12,672), which 1.6 million draws fill."""
    weight = make("pfl_cnn", COLOUR).projection[0].weight.detach()
    bound = sqrt(6 / (12_544 + 128))
    assert weight.abs().max() <= bound
    assert weight.abs().max() > 0.999 * bound
    assert float(weight.std()) == pytest.approx(bound / sqrt(3), rel=0.01)


def test_fedmlps_layers_in_order() -> None:
    """Conv-pool-ReLU, conv-pool-ReLU, conv-ReLU, linear-ReLU, as a chain of PyTorch's own modules."""
    module, images = make("fedmlp_cnn", GREY).eval(), images_of(GREY)
    first, second, third, linear = module.encoder.children()
    pool, relu, flat = torch.nn.MaxPool2d(2), torch.nn.ReLU(), torch.nn.Flatten()
    chain = torch.nn.Sequential(first, pool, relu, second, pool, relu, third, relu, flat, linear, relu)
    assert torch.equal(module.features(images), chain(images))


def test_fedmlps_dropout_is_of_channels_and_behind_the_second_convolution() -> None:
    """All channels dropped: the third convolution reads zeros, whatever the image. Kept: it reads twice the values."""
    module, given = make("fedmlp_cnn", GREY).train(), images_of(GREY)
    assert dict(module.dropout_shapes) == {"channels": (20,)}
    gone = module.features(given, {"channels": torch.zeros(4, 20)})
    assert torch.equal(gone, gone[:1].expand(4, -1))
    kept = module.features(given, {"channels": torch.ones(4, 20)})
    double = make("fedmlp_cnn", GREY).eval()
    double.load_state_dict(module.state_dict())
    with torch.no_grad():  # twice the convolution is the convolution with twice the weights
        for parameter in list(double.encoder.children())[1].parameters():
            parameter.mul_(2)
    assert torch.allclose(kept, double.features(given), atol=1e-5)
    assert not torch.allclose(kept, module.features(given), atol=1e-3)


@pytest.mark.parametrize("size", [(2, 2), (6, 4), (7, 5), (28, 29)])
def test_the_maximum_of_2_by_2_has_values_of_pytorch(size: tuple[int, int]) -> None:
    """A last odd row or column is left out; whole numbers make many ties."""
    maps = torch.randint(-3, 3, (2, 3, *size), generator=torch.Generator().manual_seed(0)).float()
    maps[0, 0, 1, 1] = torch.nan
    expected = F.max_pool2d(maps, 2)
    with torch.no_grad():
        found = max_pool(maps)
    assert torch.equal(torch.nan_to_num(found, 9), torch.nan_to_num(expected, 9))
    assert torch.equal(found.isnan(), expected.isnan()) and found.isnan().sum() == 1
    assert torch.equal(MaxPool()(maps).nan_to_num(9), expected.nan_to_num(9))


def test_the_maximum_of_2_by_2_by_hand() -> None:
    with torch.no_grad():
        assert max_pool(torch.tensor([[[1.0, 5, 0, 0], [2, 3, 0, -1]]])).tolist() == [[[5, 0]]]


def test_a_tie_gives_its_gradient_to_the_first() -> None:
    """Row by row; two elementwise maxima would give both one half."""
    maps = torch.tensor([[[1.0, 4, 4, 4]], [[4, 1, 1, 1]]]).reshape(1, 2, 2, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(max_pool(maps).sum(), [maps])
    assert gradient.flatten().tolist() == [0, 1, 0, 0, 1, 0, 0, 0]


def test_one_row_is_refused_with_and_without_gradients() -> None:
    """So that a model that is too deep for its images says so when it is built."""
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded), pytest.raises(RuntimeError, match="too small"):
            max_pool(torch.zeros(1, 1, 1, 8))
