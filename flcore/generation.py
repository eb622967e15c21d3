"""The mathematics of training a generator on the server, and of the draws that feed one.

* FedGen (Zhu, Hong and Zhou, ICML 2021), baselines.md section 6;
* FedPA (feature generator with prototype-adversarial training), fedpa.md;
* FedPG (prototype-guided generator of images), fedpg.md;
* VHL (Tang et al., ICML 2022), the Gaussian virtual set, baselines.md section 8.

Losses are pure and shape-stable: nothing branches on a tensor's value, what is missing is a mask, and gradients are
finite where distances are zero. Draws take the generator of random numbers as an argument and run on the CPU. Rounds
and steps are counted from 0, as in the papers' schedules.

Notation: B batch, d feature length, K classes, S sampled clients, z noise length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flcore.losses import weighted_mean

DivMask = Literal["intra", "inter", "all"]
DivMetric = Literal["code", "norms"]
FidelityForm = Literal["element_wise", "authors_broadcast"]
PullForm = Literal["mse", "l2"]
DistanceForm = Literal["squared", "l2"]
NoiseForm = Literal["uniform", "normal"]
MatchForm = Literal["softmax", "zero_rows", "l2"]


# Schedules


def decayed_weight(initial: float, decay: float, passed: int, floor: float = 0.0) -> float:
    """A loss weight after ``passed`` rounds: max(floor, initial·decay^passed), and 0 where ``initial`` is 0.

    A weight configured as 0 is a term that is off; the floor must not revive it (fedpa.md section 4, baselines.md
    section 6).
    """
    return max(floor, initial * decay**passed) if initial else 0.0


def exponential_lr(lr: float, decay: float, passed: int) -> float:
    """The learning rate after ``passed`` rounds: lr·decay^passed (FedGen, FedPA: decay 0.98 for the generator)."""
    return lr * decay**passed


def step_lr(lr: float, gamma: float, every: int, passed: int) -> float:
    """The learning rate after ``passed`` steps: lr·gamma^⌊passed/every⌋ (FedPG's generator: gamma 0.95 every 20)."""
    return lr * gamma ** (passed // every)


# Draws


def draw_noise(count: int, noise_dim: int, generator: torch.Generator, form: NoiseForm = "uniform") -> Tensor:
    """Noise float32 ``[count, noise_dim]``: uniform on [0, 1) or standard normal."""
    if form == "uniform":
        return torch.rand(count, noise_dim, generator=generator)
    return torch.randn(count, noise_dim, generator=generator)


def draw_labels(count: int, weights: Tensor, generator: torch.Generator) -> Tensor:
    """Labels int64 ``[count]``, drawn with replacement in proportion to ``weights``.

    Args:
        count: how many.
        weights: bool, integer or float ``[K]``, not negative. A mask of qualified labels gives uniform labels, label
            counts give labels by frequency. A class of weight 0 is never drawn.
        generator: a CPU generator.

    Raises:
        ValueError: no class has a positive weight.
    """
    classes = (weights.cpu() > 0).nonzero().flatten()
    if not len(classes):
        raise ValueError("no label can be drawn: no class has a positive weight")
    if not count:
        return classes[:0]  # PyTorch's sampler refuses to draw nothing
    return classes[torch.multinomial(weights.cpu()[classes].double(), count, replacement=True, generator=generator)]


def gaussian_virtual_images(
    num_classes: int,
    per_class: int,
    shape: tuple[int, int, int],
    generator: torch.Generator,
    *,
    map_size: int = 8,
    std: float = 0.5,
) -> Tensor:
    """VHL's virtual set: noise around one random mean map per class (baselines.md section 8).

    A mean map ``[C, map_size, map_size]`` per class from N(0, 1), samples from N(mean, std²), enlarged bilinearly to
    the image size, scaled with the minimum and maximum of the *whole set* to 0..255 and rounded.

    Args:
        num_classes: K.
        per_class: n, images of every class.
        shape: (C, H, W) of an image; one-channel sets draw one-channel maps.
        generator: a CPU generator; the set is a function of its state.
        map_size: side of the mean maps.
        std: standard deviation within a class, before the scaling.

    Returns:
        uint8 ``[K·n, C, H, W]``, class-major: image i has label ``i // per_class``.
    """
    channels, height, width = shape
    means = torch.randn(num_classes, 1, channels, map_size, map_size, generator=generator)
    maps = means + std * torch.randn(num_classes, per_class, channels, map_size, map_size, generator=generator)

    def enlarge(block: Tensor) -> Tensor:
        return F.interpolate(block, size=(height, width), mode="bilinear", align_corners=False)

    # Two passes class by class: the whole set as float32 would need four times the memory of the result.
    low = min(float(enlarge(block).min()) for block in maps)
    high = max(float(enlarge(block).max()) for block in maps)
    scale = 255 / max(high - low, 1e-12)
    return torch.cat([((enlarge(block) - low) * scale).round().clamp(0, 255).to(torch.uint8) for block in maps])


# Label statistics


def qualified_labels(counts: Tensor) -> Tensor:
    """Which classes some client saw: counts ``[S, K]`` to bool ``[K]`` (no smoothing in ``counts``)."""
    return (counts > 0).any(dim=0)


def label_weights(counts: Tensor, smoothing: float = 1.0) -> Tensor:
    """How much each client's head counts for each class: w_kc = (n_kc + s)/Σ_j(n_jc + s).

    Args:
        counts: samples by client and class, ``[S, K]``, without pseudo-counts.
        smoothing: s; the public codes of FedGen and FedPA start their counters at 1.

    Returns:
        float32 ``[S, K]``; columns sum to 1, or to 0 where nobody has the class and s = 0.
    """
    smoothed = counts.to(torch.float32) + smoothing
    total = smoothed.sum(dim=0)
    return smoothed / torch.where(total > 0, total, 1.0)


def weighted_class_means(means: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Prototypes of all clients into one per class, φ_c = Σ_k w_kc·φ_kc/Σ_k w_kc (fedpa.md section 5.1).

    Args:
        means: ``[S, K, d]``; rows of weight 0 are ignored whatever stands in them.
        weights: ``[S, K]``: sample counts n_kc (FedPA), or 1 where the client has the class (FedPG), else 0.

    Returns:
        Means float32 ``[K, d]``, zero where nobody has the class, and bool ``[K]``: somebody has.
    """
    heavy = weights.to(means.dtype).unsqueeze(2)
    total = heavy.sum(dim=0)
    sums = torch.where(heavy > 0, means * heavy, 0.0).sum(dim=0)
    return sums / torch.where(total > 0, total, 1.0), total.squeeze(1) > 0


# Losses of feature generators (FedGen, FedPA)


def diversity_loss(
    outputs: Tensor, noise: Tensor, labels: Tensor, mask: DivMask = "intra", metric: DivMetric = "code"
) -> Tensor:
    """L_div = exp(-(1/B²)·Σ_pq mask_pq·δ_h(p, q)·δ_ε(p, q)): small when different noise gives different outputs.

    Masked pairs stay in the B² (fedpa.md section 7f). Gradients flow to ``outputs`` only.

    Args:
        outputs: ``[B, d]``.
        noise: ``[B, z]`` that made them.
        labels: int64 ``[B]``.
        mask: pairs that count. ``intra``: of the same label (FedPA's paper); ``inter``: of different labels (FedPA's
            code); ``all`` (FedGen).
        metric: ``code``: δ_h the mean absolute difference, δ_ε the mean squared difference (both public codes);
            ``norms``: Euclidean norms (the papers).
    """
    apart = outputs.unsqueeze(0) - outputs.unsqueeze(1)
    noise_apart = noise.detach().unsqueeze(0) - noise.detach().unsqueeze(1)
    if metric == "code":
        products = apart.abs().mean(dim=2) * noise_apart.square().mean(dim=2)
    else:
        products = _root(apart.square().sum(dim=2)) * _root(noise_apart.square().sum(dim=2))
    if mask != "all":
        same = labels.unsqueeze(0) == labels.unsqueeze(1)
        products = products * (same if mask == "intra" else ~same)
    return torch.exp(-products.mean())


def frozen_head_logits(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What the linear heads of S clients say to the same features; the heads receive no gradient.

    Args:
        features: ``[B, d]``.
        weight: ``[S, K, d]``.
        bias: ``[S, K]``.

    Returns:
        Logits ``[S, B, K]``.
    """
    return torch.einsum("bd,skd->sbk", features, weight.detach()) + bias.detach().unsqueeze(1)


def fidelity_loss(logits: Tensor, labels: Tensor, weights: Tensor, form: FidelityForm = "element_wise") -> Tensor:
    """L_fid: cross-entropy of the clients' heads on generated features, weighted by client and class.

    Args:
        logits: ``[S, B, K]`` (:func:`frozen_head_logits`).
        labels: int64 ``[B]``, what was asked of the generator.
        weights: ``[S, K]`` (:func:`label_weights`).
        form: see :func:`weighted_client_mean`.
    """
    clients, batch, classes = logits.shape
    losses = F.cross_entropy(
        logits.reshape(clients * batch, classes), labels.repeat(clients), reduction="none"
    ).reshape(clients, batch)
    return weighted_client_mean(losses, weights[:, labels], form)


def weighted_client_mean(losses: Tensor, weights: Tensor, form: FidelityForm = "element_wise") -> Tensor:
    """(1/B)·Σ_j Σ_k w_kj·l_kj; the weights sum to 1 over k, hence no 1/S (fedpa.md section 5.2).

    Args:
        losses: by client and sample, ``[S, B]``.
        weights: likewise ``[S, B]``.
        form: ``element_wise``; or ``authors_broadcast``, the public codes' mistake, which multiplies [B] by [B, 1] and
            so yields Σ_k mean(w_k)·mean(l_k): the weights no longer belong to the samples (fedpa.md section 7b).
    """
    if form == "authors_broadcast":
        return (weights.mean(dim=1) * losses.mean(dim=1)).sum()
    return (weights * losses).sum(dim=0).mean()


def prototype_pull(
    features: Tensor,
    labels: Tensor,
    prototypes: Tensor,
    present: Tensor,
    form: PullForm = "mse",
    *,
    cap: float | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Mean distance of features to the prototype of their label: FedPA's L_po (clients) and L_ad (server).

    A sample whose class has no prototype contributes 0, has no gradient and still counts in the mean. Prototypes
    receive no gradient.

    Args:
        features: ``[B, d]``.
        labels: int64 ``[B]``.
        prototypes: ``[K, d]``; rows of missing classes are ignored whatever stands in them.
        present: bool ``[K]``.
        form: ``mse``: the mean of squares over d (the public code); ``l2``: the un-squared norm (the paper).
        cap: clamps the distance of a single sample, in the unit of ``form``; beyond it a sample has no gradient. Keeps
            the generator, which *maximises* this term, from running away (``ad_cap``, fedpa.md section 5.2).
        weight: ``[B]``, 1 for real samples and 0 for padding; None: all are real.
    """
    known = present[labels]
    difference = torch.where(known.unsqueeze(1), features - prototypes.detach()[labels], 0.0)
    squares = difference.square()
    distance = squares.mean(dim=1) if form == "mse" else _root(squares.sum(dim=1))
    if cap is not None:
        distance = distance.clamp_max(cap)
    return weighted_mean(distance, weight)


def teacher_divergence(logits: Tensor, teacher: Tensor, weight: Tensor | None = None) -> Tensor:
    """FedGen's client term KL(softmax(teacher) ‖ softmax(logits)), mean over the batch; the teacher has no gradient.

    Args:
        logits: ``[B, K]`` of the model on real images.
        teacher: ``[B, K]`` of the client's own head on generated features of the same labels.
        weight: ``[B]``, 1 for real samples and 0 for padding; None: all are real.
    """
    # Written out: vmap has no rule for F.kl_div and would go through clients one by one.
    target, answer = F.log_softmax(teacher.detach(), dim=1), F.log_softmax(logits, dim=1)
    divergence = target.exp() * (target - answer)
    return weighted_mean(divergence.sum(dim=1), weight)


# Losses of FedPG's image generator


def squared_distances(features: Tensor, targets: Tensor) -> Tensor:
    """‖z_i − P_c‖² for features ``[B, d]`` and targets ``[K, d]``: ``[B, K]``.

    By differences, which need B·K·d values: expanding the square would cancel where features and targets are close.
    """
    return (features.unsqueeze(1) - targets.unsqueeze(0)).square().sum(dim=2)


def dce_loss(
    features: Tensor,
    labels: Tensor,
    targets: Tensor,
    *,
    scale: float = 2.0,
    distance: DistanceForm = "squared",
    denominator: Literal["all", "negatives"] = "all",
) -> Tensor:
    """ℓ_dce: cross-entropy over logits −s·D, D the distances of features to all classes' targets (Eq. 7 and 8).

    Args:
        features: of generated images, un-normalised, ``[B, d]``.
        labels: int64 ``[B]``.
        targets: P', ``[K, d]``.
        scale: s; the paper's temperature τ is 1/s (fedpg.md section 7b).
        distance: ``squared`` (the code) or ``l2``, un-squared.
        denominator: ``all`` classes, the ordinary softmax of the code; ``negatives``: without the label's own class, as
            Eq. 8 is printed. The latter has no lower bound (fedpg.md section 7a), is there for comparison and needs
            K ≥ 2.
    """
    logits = squared_distances(features, targets)
    logits = -scale * (logits if distance == "squared" else _root(logits))
    if denominator == "all":
        return F.cross_entropy(logits, labels)
    own = labels.unsqueeze(1) == torch.arange(targets.shape[0], device=labels.device)
    positive = torch.where(own, logits, 0.0).sum(dim=1)
    return (logits.masked_fill(own, -math.inf).logsumexp(dim=1) - positive).mean()


def prototype_loss(features: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """ℓ_p = (1/B)·Σ_i ‖z_i − P'_{y_i}‖², a sum over d; features ``[B, d]``, labels ``[B]``, targets ``[K, d]``."""
    return (features - targets[labels]).square().sum(dim=1).mean()


def prototype_match(
    targets: Tensor,
    prototypes: Tensor,
    present: Tensor,
    *,
    scale: float = 2.0,
    reduction: Literal["mean", "sum"] = "mean",
    form: MatchForm = "softmax",
) -> Tensor:
    """d(P', P): how well trainable targets stand at the global prototypes, over the classes that have one.

    Args:
        targets: P', ``[K, d]``.
        prototypes: P, ``[K, d]``, constant; rows of missing classes are ignored whatever stands in them.
        present: bool ``[K]``; with none present the value is 0.
        scale: s of the softmax over −s·‖P'_c − P_i‖².
        reduction: ``mean`` over the present classes (the code) or their ``sum`` (the paper).
        form: ``softmax`` over the present classes; ``zero_rows``: the code's, where a missing class stands in the
            denominator as a zero vector (fedpg.md section 7e); ``l2``: ‖P'_c − P_c‖² instead, which unlike the softmax
            does not saturate at large distances (section 7c).
    """
    rows = torch.where(present.unsqueeze(1), prototypes.detach(), 0.0)
    if form == "l2":
        values = (targets - rows).square().sum(dim=1)
    else:
        logits = -scale * squared_distances(targets, rows)
        if form == "softmax":
            # The most negative number instead of -inf: with no class present -inf - -inf would be NaN.
            logits = logits.masked_fill(~present, torch.finfo(logits.dtype).min)
        values = -F.log_softmax(logits, dim=1).diagonal()
    total = torch.where(present, values, 0.0).sum()
    return total if reduction == "sum" else total / present.sum().clamp_min(1)


def guided_targets(prototypes: Tensor, present: Tensor, previous: Tensor | None, generator: torch.Generator) -> Tensor:
    """FedPG's P' with ``proto_init = global``: what a round's generator training aims at (fedpg.md section 7c).

    P_c where a class has a prototype, bit for bit; else last round's target; else, in the first training, a draw from
    N(0, I) rescaled to the mean norm of the present prototypes (not rescaled where none is present). ``generator`` is
    used in the same way whatever is present.

    Args:
        prototypes: P, ``[K, d]``.
        present: bool ``[K]``.
        previous: last round's targets ``[K, d]``; None before the first training.
        generator: a CPU generator.
    """
    num_classes, feature_dim = prototypes.shape
    fallback = random_targets(num_classes, feature_dim, generator).to(prototypes.device)
    norms = torch.where(present, torch.linalg.vector_norm(prototypes, dim=1), 0.0)
    mean_norm = norms.sum() / present.sum().clamp_min(1)
    rescaled = fallback * (mean_norm / torch.linalg.vector_norm(fallback, dim=1, keepdim=True))
    fallback = torch.where(present.any(), rescaled, fallback) if previous is None else previous
    return torch.where(present.unsqueeze(1), prototypes, fallback)


def random_targets(num_classes: int, feature_dim: int, generator: torch.Generator) -> Tensor:
    """FedPG's P' with ``proto_init = random`` (the code): N(0, 1) entries, float32 ``[K, d]``, anew every round."""
    return torch.randn(num_classes, feature_dim, generator=generator)


def nearest_prototype_accuracy(features: Tensor, labels: Tensor, prototypes: Tensor, present: Tensor) -> Tensor:
    """The share of features, among those of present classes, whose nearest present prototype is their label's.

    Tells whether virtual data help: low values cost accuracy (fedpg.md sections 5.3 and 11). 0 with none present.

    Args:
        features: of virtual images, ``[B, d]``.
        labels: int64 ``[B]``.
        prototypes: the global P, not the targets P', ``[K, d]``.
        present: bool ``[K]``.
    """
    rows = torch.where(present.unsqueeze(1), prototypes, 0.0)
    nearest = squared_distances(features, rows).masked_fill(~present, math.inf).argmin(dim=1)
    known = present[labels]
    return (known & (nearest == labels)).sum() / known.sum().clamp_min(1)


# Adam whose state lives from round to round


@dataclass(frozen=True)
class AdamState:
    """Adam's memory by parameter name: ``steps`` made so far, first and second moments of the gradients."""

    steps: int
    first: Mapping[str, Tensor]
    second: Mapping[str, Tensor]

    @classmethod
    def fresh(cls, params: Mapping[str, Tensor]) -> AdamState:
        """Before the first step."""
        # Two sets of tensors: files refuse names that share memory.
        first, second = ({name: torch.zeros_like(p, requires_grad=False) for name, p in params.items()} for _ in "12")
        return cls(0, first, second)

    def arrays(self) -> dict[str, Tensor]:
        """``steps`` int64 ``[1]``, ``first/<name>`` and ``second/<name>``."""
        named = {f"first/{name}": tensor for name, tensor in self.first.items()}
        named |= {f"second/{name}": tensor for name, tensor in self.second.items()}
        return {"steps": torch.tensor([self.steps], dtype=torch.int64)} | named

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor]) -> AdamState:
        """The inverse of :meth:`arrays`; the order of the names does not matter."""
        first, second = (
            {key.removeprefix(part): tensor for key, tensor in arrays.items() if key.startswith(part)}
            for part in ("first/", "second/")
        )
        return cls(int(arrays["steps"][0]), first, second)


@torch.no_grad()
def adam_step(
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    state: AdamState,
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[dict[str, Tensor], AdamState]:
    """One step of ``torch.optim.Adam`` (Kingma and Ba, ICLR 2015) as a function: arguments stay as they are.

    Args:
        params: by name.
        grads: likewise, of the same shapes.
        state: of the steps before; :meth:`AdamState.fresh` at first.
        lr: learning rate of this step.
        betas: decay of the two moments; FedPG's generator uses (0.5, 0.999).
        epsilon: added to the root of the second moment.
        weight_decay: L2 penalty, added to the gradient (not decoupled as in AdamW).

    Returns:
        The parameters after the step, without gradient history, and the state after it.
    """
    names = list(params)
    old, gradients = [params[name] for name in names], [grads[name] for name in names]
    if weight_decay:
        gradients = list(torch._foreach_add(gradients, old, alpha=weight_decay))
    steps = state.steps + 1
    first = torch._foreach_lerp([state.first[name] for name in names], gradients, 1 - betas[0])
    second = torch._foreach_mul([state.second[name] for name in names], betas[1])
    torch._foreach_addcmul_(second, gradients, gradients, value=1 - betas[1])
    denominators = torch._foreach_sqrt(second)
    torch._foreach_div_(denominators, math.sqrt(1 - betas[1] ** steps))
    torch._foreach_add_(denominators, epsilon)
    new = torch._foreach_addcdiv(old, first, denominators, value=-lr / (1 - betas[0] ** steps))
    after = AdamState(steps, dict(zip(names, first, strict=True)), dict(zip(names, second, strict=True)))
    return dict(zip(names, new, strict=True)), after


class FusedAdam:
    """Adam without memory at the start, in place on tensors of the caller's own; same arithmetic as :func:`adam_step`.

    For hundreds of steps at a time on millions of weights: PyTorch's fused kernel takes a quarter of the time.
    ``torch.optim.Adam`` uses it, too, but its first use imports PyTorch's compiler, which takes seconds.
    """

    def __init__(self, params: Sequence[Tensor], betas: tuple[float, float] = (0.9, 0.999), epsilon: float = 1e-8):
        """Take the tensors that :meth:`step` moves; ``betas`` and ``epsilon`` as in :func:`adam_step`."""
        self._params, self._betas, self._epsilon = [param.detach() for param in params], betas, epsilon
        self._first = [torch.zeros_like(param) for param in self._params]
        self._second = [torch.zeros_like(param) for param in self._params]
        self._steps = [torch.zeros((), device=param.device) for param in self._params]

    def step(self, grads: Sequence[Tensor], lr: float) -> None:
        """One step along ``grads``, of the same shapes as the parameters, with learning rate ``lr``."""
        torch._foreach_add_(self._steps, 1)
        torch._fused_adam_(
            self._params,
            list(grads),
            self._first,
            self._second,
            [],
            self._steps,
            lr=lr,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=0.0,
            eps=self._epsilon,
            amsgrad=False,
            maximize=False,
        )


def _root(squares: Tensor) -> Tensor:
    """The square root, with gradient 0 instead of infinity at 0."""
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)
