"""Models: the specifications' parameter counts, the feature tap, seeds, and dropout whose noise is an argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flcore.config.schema import Config
from flcore.models import MODELS, Backbone, build_model, extract_weights, load_weights
from flcore.models.base import dropout, laid_out, snapshot

GREY, COLOUR = (1, 28, 28), (3, 32, 32)
SHAPES = {"celeba_cnn": (3, 84, 84)}  # what does not read small images


def make(name: str, shape: tuple[int, int, int], num_classes: int = 10, seed: int = 0, **options: Any) -> Backbone:
    return build_model(MODELS[name](**options), shape, num_classes, seed)


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "parameters"),
    [
        # (9+1)·6 + 12 + (54+1)·16 + 32 = 60 + 12 + 880 + 32 = 984; 784·32 + 32 = 25,120; head 330 or 26·33 = 858
        ("fedgen_cnn", GREY, 10, {}, 984 + 25_120 + 330),
        ("fedgen_cnn", GREY, 26, {}, 984 + 25_120 + 858),
        ("fedproto_cnn", GREY, 10, {}, 260 + 5_020 + 16_050 + 510),
        ("fedcspc_cnn", COLOUR, 10, {}, 61_156 + 28_900 + 2_570),
        ("fedavg_cnn", GREY, 10, {}, 832 + 51_264 + 524_800 + 5_130),
        ("fedavg_cnn", GREY, 10, {"hidden": 0}, 832 + 51_264 + 10_250),
        ("pixels", GREY, 10, {}, 7_850),
        ("resnet18", COLOUR, 10, {}, 11_173_962),
        ("resnet18", COLOUR, 10, {"stem": "imagenet"}, 11_181_642),
    ],
)
def test_parameter_counts(name: str, shape: Any, classes: int, options: Any, parameters: int) -> None:
    """26,434 and 26,962 (fedpa.md 2), 21,840 (baselines.md 15), 92,626 (fedcspc.md 2), ResNet-18 (data.md 1.4)."""
    published = {26_434, 26_962, 21_840, 92_626, 11_173_962, 11_181_642, 582_026, 62_346, 7_850}
    assert parameters in published
    module = make(name, shape, classes, **options)
    assert count(module) == parameters == extract_weights(module).num_parameters


def test_parts_of_a_resnet_with_fedcspcs_projection() -> None:
    """Without it 11,173,962 with a head of 512·10 + 10. Projection: 512·512 + 512, 512·256 + 256; head 256·100 + 100.

    Together 11.59 M, as fedcspc.md, section 3, has it for CIFAR-100.
    """
    module = make("resnet18", COLOUR, 100, projection_dim=256)
    parts = [count(part) for part in (module.encoder, module.projection, module.head)]
    assert parts == [11_173_962 - 5_130, 262_656 + 131_328, 25_700]
    assert f"{sum(parts) / 1e6:.2f}" == "11.59"


def test_parts_of_the_fedcspc_cnn() -> None:
    module = make("fedcspc_cnn", COLOUR)
    assert [count(part) for part in (module.encoder, module.projection, module.head)] == [61_156, 28_900, 2_570]


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
        ("fedcspc_cnn", COLOUR, {"projection_dim": 84}, 84),
        ("fedcspc_cnn", GREY, {}, 256),
        ("resnet18", (1, 28, 28), {}, 512),
        ("resnet18", (1, 32, 32), {"stem": "imagenet"}, 512),
    ],
)
def test_the_feature_is_what_the_head_reads(name: str, shape: Any, options: Any, dim: int) -> None:
    module = make(name, shape, 5, **options).eval()
    images = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    features, logits = module(images)
    assert (module.feature_dim, module.num_classes) == (dim, 5)
    assert features.shape == (3, dim)
    assert torch.equal(logits, features @ module.head.weight.T + module.head.bias) or torch.allclose(
        logits, features @ module.head.weight.T + module.head.bias, atol=1e-5
    )
    assert {name.split(".")[0] for name, _ in module.named_parameters()} <= {"encoder", "projection", "head"}


@pytest.mark.parametrize(("name", "shape"), [("fedproto_cnn", (1, 12, 12)), ("fedcspc_cnn", (3, 12, 12))])
def test_images_that_are_too_small_are_refused_with_a_cure(name: str, shape: Any) -> None:
    with pytest.raises(ValueError, match=r"images of 12x12 are too small .* set data\.size to 28 or 32"):
        make(name, shape)


def test_the_run_names_the_model_that_cannot_read_the_images(lab: Any) -> None:
    from flcore.core.errors import ConfigError

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
    module = make("fedproto_cnn", GREY)
    images = torch.rand(4, *GREY, generator=torch.Generator().manual_seed(0))
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
