"""What holds for every loss of a batch: padding is no sample, a stack of clients equals the loop, nothing is NaN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from flcore.math.losses.alignment import (
    angle_loss,
    dot_regression,
    edge_loss,
    extrapolate,
    memory_divergence,
    not_true_distillation,
    prototype_pull,
    row_distance,
    smooth_l1_to_prototypes,
    triplet_hinge,
)
from flcore.math.losses.basic import (
    anchor_distance,
    correlation_penalty,
    cross_entropy,
    gradient_distance,
    linear_gradient,
    weighted_mean,
)
from flcore.math.losses.contrastive import (
    contrastive_terms,
    model_contrast,
    prototype_contrast,
    source_weights,
    supervised_contrastive,
)

Inputs = dict[str, Tensor]
Loss = Callable[[Tensor, Inputs], Tensor]


def of_prototypes(function: Callable[..., Tensor], *after: object, **options: object) -> Loss:
    return lambda f, t: function(f, t["labels"], t["means"], t["present"], *after, weight=t["weight"], **options)


def of_anchors_with_positives(losses: Tensor, has_positive: Tensor, weight: Tensor) -> Tensor:
    return weighted_mean(losses, weight * has_positive)


def of_memory(**options: object) -> Loss:
    return lambda f, t: memory_divergence(
        f,
        t["labels"],
        t["means"],
        t["present"],
        t["centres"],
        t["centres_present"],
        weight=t["weight"],
        **options,  # type: ignore[arg-type]
    )


LOSSES: dict[str, Loss] = {
    "cross-entropy": lambda f, t: cross_entropy(f, t["labels"], t["weight"]),  # features as logits
    "anchors": lambda f, t: anchor_distance(f, t["labels"], t["means"], t["weight"]),
    "pull": of_prototypes(prototype_pull),
    "pull, l2": of_prototypes(prototype_pull, "l2"),
    "angle": of_prototypes(angle_loss),
    "angle, all": of_prototypes(angle_loss, mode="all"),
    "edge": of_prototypes(edge_loss),
    "edge, literal": of_prototypes(edge_loss, relative=False, same_label=False),
    "smooth l1": of_prototypes(smooth_l1_to_prototypes),
    "smooth l1, sum": of_prototypes(smooth_l1_to_prototypes, reduction="sum"),
    "memory": of_memory(),
    "memory, reversed": of_memory(temperature=0.5, direction="cz"),
    "mse": lambda f, t: row_distance(f, t["other"], t["weight"]),
    "l2": lambda f, t: row_distance(f, t["means"][t["labels"]], t["weight"] * t["present"][t["labels"]], form="l2"),
    "not true": lambda f, t: not_true_distillation(f, t["other"], t["labels"], temperature=2.0, weight=t["weight"]),
    "dot regression": lambda f, t: dot_regression(f, t["labels"], t["means"].mT, t["weight"]),
    "hinge": lambda f, t: triplet_hinge(f, *extrapolate(f, t["other"], f.flip(-1), 0.5), weight=t["weight"]),
    "matching": lambda f, t: (
        t["weight"].sum().clamp_max(1)
        * gradient_distance(linear_gradient(f, t["labels"], t["means"], t["bias"], t["weight"])[0], t["centres"])
    ),
    "supcon": lambda f, t: supervised_contrastive(f, t["labels"], 0.5, weight=t["weight"]),
    "wcl": lambda f, t: of_anchors_with_positives(
        *contrastive_terms(
            f, t["labels"], 0.5, weight=t["weight"], pair_weights=source_weights(t["labels"], t["sources"])
        ),
        t["weight"],
    ),
    "moon": lambda f, t: model_contrast(f, t["other"], t["previous"], t["previous_present"], 0.5, t["weight"]),
    "node": of_prototypes(prototype_contrast, 0.5),
    "fedproc": of_prototypes(prototype_contrast, 0.5, similarity="inner", count_missing=True),
    "decorrelation": lambda f, t: correlation_penalty(f, weight=t["weight"]),
    "decorrelation, paper": lambda f, t: correlation_penalty(f, scaling="paper", weight=t["weight"]),
}


def inputs(seed: int, batch: int = 6, real: int = 6, dim: int = 4, classes: int = 4) -> Inputs:
    """A batch of which ``real`` samples count, and all that a loss may ask for beside it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "features": normal(batch, dim),
        "labels": torch.randint(classes, (batch,), generator=generator),
        "weight": (torch.arange(batch) < real).float(),
        "other": normal(batch, dim),
        "means": normal(classes, dim),
        "present": torch.rand(classes, generator=generator) < 0.8,
        "centres": normal(classes, dim),
        "centres_present": torch.rand(classes, generator=generator) < 0.5,
        "bias": normal(classes),
        "sources": torch.randint(2, (batch,), generator=generator),
        "previous": normal(2, batch, dim),
        "previous_present": torch.rand(2, generator=generator) < 0.5,
    }


def first_rows(tensors: Inputs, real: int) -> Inputs:
    rows = {name: tensors[name][:real] for name in ("features", "labels", "weight", "other", "sources")}
    return tensors | rows | {"previous": tensors["previous"][:, :real]}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("real", "seed"), [(1, 3), (4, 2)])
def test_padding_changes_nothing(name: str, real: int, seed: int) -> None:
    padded = inputs(seed, real=real)
    bare = first_rows(padded, real)
    loss, expected = LOSSES[name](padded["features"], padded), LOSSES[name](bare["features"], bare)
    assert loss.item() == pytest.approx(expected.item(), abs=2e-6)
    gradient = grad(LOSSES[name])(padded["features"], padded)
    assert torch.allclose(gradient[:real], grad(LOSSES[name])(bare["features"], bare), atol=2e-6)
    assert torch.equal(gradient[real:], torch.zeros_like(gradient[real:]))


@pytest.mark.parametrize("name", LOSSES)
def test_a_stack_of_clients_equals_the_loop(name: str) -> None:
    clients = [inputs(seed, real=real) for seed, real in ((1, 6), (2, 4), (5, 6), (4, 1))]
    for client, present in zip(clients, ([1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]), strict=True):
        client["present"] = torch.tensor(present).bool()
        client["previous_present"] = client["present"][1:3]
    clients[2]["centres_present"] = torch.zeros(4, dtype=torch.bool)
    stack = {key: torch.stack([client[key] for client in clients]) for key in clients[0]}
    for function in (LOSSES[name], grad(LOSSES[name])):
        together = vmap(function)(stack["features"], stack)
        one_by_one = torch.stack([function(client["features"], client) for client in clients])
        assert torch.allclose(together, one_by_one, atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_counts(name: str) -> None:
    """All samples padded: loss and gradient exactly 0."""
    tensors = inputs(0, real=0)
    assert LOSSES[name](tensors["features"], tensors).item() == 0.0
    assert torch.equal(grad(LOSSES[name])(tensors["features"], tensors), torch.zeros(6, 4))


@pytest.mark.parametrize(
    "kind", ["zero", "equal", "target", "own prototype", "one class", "large", "no prototype", "one sample"]
)
def test_gradients_are_finite_at_the_edges(kind: str) -> None:
    tensors = inputs(4, real=1 if kind == "one sample" else 6)
    features = tensors["features"]
    if kind == "zero":
        features = torch.zeros_like(features)
    elif kind == "equal":
        features = torch.ones_like(features)
    elif kind == "target":
        features = tensors["other"]
    elif kind == "own prototype":
        features = tensors["means"][tensors["labels"]]
    elif kind == "one class":
        tensors["labels"] = torch.zeros_like(tensors["labels"])
    elif kind == "large":
        features = 1e4 * features
    elif kind == "no prototype":
        for present in ("present", "centres_present", "previous_present"):
            tensors[present] = torch.zeros_like(tensors[present])
    for name, loss in LOSSES.items():
        assert loss(features, tensors).isfinite(), name
        assert grad(loss)(features, tensors).isfinite().all(), name
