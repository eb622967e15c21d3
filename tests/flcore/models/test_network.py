"""A model's parts as functions of weights: the same answers, gradients where they belong, nothing of its own moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flcore.config.schema import Config
from flcore.models import Backbone, build_model, extract_weights
from flcore.models.network import Network, SwappedParams

SHAPES = {"fedgen_cnn": (1, 16, 16), "fedproto_cnn": (1, 28, 28), "fedcspc_cnn": (3, 32, 32)}


def make(name: str, seed: int = 0) -> Backbone:
    """A model whose BatchNorm statistics are not those it starts with."""
    module = build_model(Config.from_mapping({"model": {"name": name}}).model_spec, SHAPES[name], 5, seed)
    module.train()(images(name, 3))
    return module


def images(name: str, seed: int = 0) -> torch.Tensor:
    return torch.rand(4, *SHAPES[name], generator=torch.Generator().manual_seed(seed))


def values_of(module: Backbone) -> dict[str, torch.Tensor]:
    return extract_weights(module).values


@pytest.mark.parametrize("name", SHAPES)
def test_each_part_with_other_weights(name: str) -> None:
    """The answers of a module that has the other weights, in evaluation mode, whatever mode the own one is in."""
    own, other = make(name).train(), make(name, seed=1)
    network, values, given = Network(own), values_of(other), images(name)
    other.eval()
    encoded = network.encode(given, values)
    features = network.project(encoded, values)
    assert torch.equal(encoded, other.encode(given))
    assert torch.equal(features, other.features(given))
    assert torch.equal(network.features(given, values), features)
    assert torch.equal(network.classify(features, values), other.classify(features))
    assert not torch.equal(network.features(given, values_of(own)), features)
    assert (network.feature_dim, network.num_classes) == (own.feature_dim, 5)


@pytest.mark.parametrize("name", SHAPES)
def test_the_module_is_left_as_it_is(name: str) -> None:
    """Neither its values, nor its statistics, nor its mode, nor what of it moves."""
    module = make(name).train()
    module.head.requires_grad_(False)
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    network = Network(module)
    network.features(images(name), values_of(make(name, seed=1)))
    assert module.training
    assert [p.requires_grad for p in module.head.parameters()] == [False, False]
    assert all(p.requires_grad for p in module.encoder.parameters())
    for key, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[key]), key


def test_names_that_are_not_given_are_the_initial_ones() -> None:
    """Only the head is another: features are those of the copied model, logits those of the other head."""
    module, other = make("fedgen_cnn").eval(), make("fedgen_cnn", seed=1).eval()
    network, given = Network(module), images("fedgen_cnn")
    head = {name: tensor for name, tensor in values_of(other).items() if name.startswith("head.")}
    features = network.features(given, head)
    assert torch.equal(features, module.features(given))
    assert torch.equal(network.classify(features, head), other.classify(features))


def test_gradients_flow_to_values_and_inputs_and_nowhere_else() -> None:
    module = make("fedgen_cnn")
    network, given = Network(module), images("fedgen_cnn").requires_grad_()
    values = values_of(make("fedgen_cnn", seed=1))
    weight = values["head.weight"].requires_grad_()
    logits = network.classify(network.features(given, values), values)
    to_images, to_weight = torch.autograd.grad(logits.square().sum(), [given, weight])
    assert to_images.abs().sum() > 0 and to_weight.abs().sum() > 0
    assert all(parameter.grad is None for parameter in module.parameters())
    # With constants on both sides nothing is recorded at all: a frozen model costs no backward pass.
    assert not network.features(images("fedgen_cnn"), values_of(module)).requires_grad
    assert not network.features(images("fedgen_cnn"), {}).requires_grad


def test_many_models_at_once() -> None:
    """Under vmap over stacked weights: the answers of each, to a few roundings of float32."""
    others = [make("fedgen_cnn", seed=seed) for seed in (1, 2, 3)]
    network, given = Network(make("fedgen_cnn")), images("fedgen_cnn")
    names = values_of(others[0])
    stacked = {name: torch.stack([values_of(other)[name] for other in others]) for name in names}
    found = torch.vmap(lambda values: network.features(given, values))(stacked)
    for index, other in enumerate(others):
        assert torch.allclose(found[index], other.eval().features(given), atol=1e-5)


def test_a_bound_module_is_itself_again_after_the_call() -> None:
    """Also after a function that fails; and what it returned keeps the other values."""
    module = make("fedcspc_cnn").eval()
    bound, given = SwappedParams(module), images("fedcspc_cnn")
    expected, values = module.features(given), values_of(make("fedcspc_cnn", seed=1))
    assert not torch.equal(bound.call(values, lambda m: m.features(given)), expected)
    assert torch.equal(module.features(given), expected)

    def fail(m: Backbone) -> Any:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        bound.call(values, fail)
    assert torch.equal(module.features(given), expected)
    assert torch.equal(bound.call({}, lambda m: m.features(given)), expected)


def test_a_tensor_that_two_layers_share_is_one_value() -> None:
    """Given by either name it is the value of both: 3 and 3 times 1 are 9, not 3 times the initial weight."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    module[1].weight = module[0].weight
    for name in ("0.weight", "1.weight"):
        assert SwappedParams(module).call({name: torch.tensor([[3.0]])}, lambda m: m(torch.ones(1, 1))).item() == 9


def test_a_name_that_the_module_does_not_have_is_refused() -> None:
    """And what was put in place before it is taken out again."""
    module = make("fedcspc_cnn").eval()
    expected, values = module.features(images("fedcspc_cnn")), values_of(make("fedcspc_cnn", seed=1))
    with pytest.raises(KeyError, match=r"head\.wieght"):
        SwappedParams(module).call(
            values | {"head.wieght": values["head.weight"]}, lambda m: m.features(images("fedcspc_cnn"))
        )
    assert torch.equal(module.features(images("fedcspc_cnn")), expected)


def test_running_statistics_move_in_the_values_of_a_bound_module() -> None:
    """In training mode BatchNorm writes where it reads: into the values of the call, not into the module."""
    module = make("fedgen_cnn").train()
    own = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    values = values_of(make("fedgen_cnn", seed=1))
    before = {name: tensor.clone() for name, tensor in values.items()}
    SwappedParams(module).call(values, lambda m: m.features(images("fedgen_cnn")))
    assert int(values["encoder.1.num_batches_tracked"]) == int(before["encoder.1.num_batches_tracked"]) + 1
    assert not torch.equal(values["encoder.1.running_mean"], before["encoder.1.running_mean"])
    assert all(torch.equal(tensor, own[name]) for name, tensor in module.state_dict().items())
