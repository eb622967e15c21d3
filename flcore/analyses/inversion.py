"""Rebuild images from features and from prototypes (evaluation.md 5.3; FedPG figure 8, GFPL appendix B).

An attacker with the global model knows the body that made the features. Attack A trains a decoder on (feature, image)
pairs of the *test* split and applies it to features of a client's *training* images: single ones, and means over m of
one class and client, which is a prototype. Attack B uses no other images: it searches the pixels of the feature.

Scores are against the *closest* image of the averaged set (for m = 1 the true one) and against the mean image of the
client's class. The baseline needs no feature: the class's mean image of the test split. An attack that comes no closer
learns nothing from the feature.

Deviation: the paper names only a "SqueezeNet model" as decoder; here transposed convolutions, d → 256 maps of 4×4 →
image, as the specification decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flcore.analyses.base import AnalysisResult, FinishedRun, Row
from flcore.core.rng import numpy_stream, seeded_globally, torch_stream
from flcore.data.images import normalise
from flcore.io.messages import Weights

SIZES = (1, 2, 3, 5, 10)
MOST_CLASSES = 20
GROUPS = 4
"""Means of every size and class."""

BASELINE = "class mean image"
_WIDTHS = (256, 64, 32, 16)
_WINDOW, _SIGMA = 11, 1.5
_C1, _C2 = 0.01**2, 0.03**2


# ------------------------------------------------------------------------------------------------- distance of images


def squared_errors(images: Tensor, others: Tensor) -> Tensor:
    """Return the mean squared error of every pair of images, [N] for two [N, C, H, W]."""
    return (images - others).square().flatten(1).mean(dim=1)


def psnr(mse: float) -> float:
    """Return the peak signal-to-noise ratio in dB of images on 0 to 1; infinite without an error."""
    return math.inf if mse == 0 else -10 * math.log10(mse)


def ssim(images: Tensor, others: Tensor) -> Tensor:
    """Return the structural similarity, at most 1, of every pair of images (Wang et al., IEEE TIP 2004).

    Gaussian windows of 11×11 with standard deviation 1.5 inside the image, C1 = 0.01², C2 = 0.03²; the mean over
    windows and channels. Smaller images get the largest odd window that fits.

    Args:
        images, others: on 0 to 1, [N, C, H, W].
    """
    size = min(_WINDOW, *(side - 1 + side % 2 for side in images.shape[-2:]))
    offsets = torch.arange(size, dtype=torch.float64) - size // 2
    line = torch.exp(-offsets.square() / (2 * _SIGMA**2))
    line = line / line.sum()
    window = torch.outer(line, line).expand(images.shape[1], 1, size, size)

    def local_mean(values: Tensor) -> Tensor:
        return F.conv2d(values, window, groups=images.shape[1])

    x, y = images.cpu().double(), others.cpu().double()
    mean_x, mean_y = local_mean(x), local_mean(y)
    # Rounding may make a variance slightly negative, which the constants outweigh.
    variances = local_mean(x * x) - mean_x.square() + local_mean(y * y) - mean_y.square()
    covariance = local_mean(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _C1) / (mean_x.square() + mean_y.square() + _C1)
    structure = (2 * covariance + _C2) / (variances + _C2)
    return (luminance * structure).flatten(1).mean(dim=1)


# ------------------------------------------------------------------------------------------------------------ attacks


class Decoder(nn.Module):
    """Features [B, d] to images [B, C, H, W] on 0 to 1.

    Linear to 256 maps of 4×4, then transposed convolutions that double the size until the image fits; the middle is
    cut out.
    """

    def __init__(self, feature_dim: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.shape = shape
        layers: list[nn.Module] = [
            nn.Linear(feature_dim, _WIDTHS[0] * 16),
            nn.Unflatten(1, (_WIDTHS[0], 4, 4)),
            nn.BatchNorm2d(_WIDTHS[0]),
            nn.ReLU(),
        ]
        size, stage = 4, 0
        while size < max(shape[1:]):
            maps, fewer = (_WIDTHS[min(s, len(_WIDTHS) - 1)] for s in (stage, stage + 1))
            layers += [nn.ConvTranspose2d(maps, fewer, 4, stride=2, padding=1), nn.BatchNorm2d(fewer), nn.ReLU()]
            size, stage = 2 * size, stage + 1
        layers += [nn.Conv2d(_WIDTHS[min(stage, len(_WIDTHS) - 1)], shape[0], 3, padding=1), nn.Sigmoid()]
        self.network = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        images = self.network(features)
        top, left = ((images.shape[-2 + axis] - self.shape[1 + axis]) // 2 for axis in (0, 1))
        return images[:, :, top : top + self.shape[1], left : left + self.shape[2]]


def train_decoder(
    features: Tensor, images: Tensor, *, steps: int = 1000, batch_size: int = 64, lr: float = 1e-3, seed: int = 0
) -> Callable[[Tensor], Tensor]:
    """Train attack A by least squares (Adam, mini-batches with replacement); return features → images.

    Args:
        features: [n, d], n >= 2, of the frozen body; standardised per dimension inside.
        images: float [n, C, H, W] on 0 to 1.
        steps, batch_size, lr: of Adam; the size is at least 2.
        seed: of initial weights and mini-batches; the global generator is restored.
    """
    with seeded_globally(seed):
        channels, height, width = images.shape[1:]
        decoder = Decoder(features.shape[1], (channels, height, width)).to(features.device)
    mean, scale = features.mean(dim=0), features.std(dim=0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    optimizer = torch.optim.Adam(decoder.parameters(), lr)
    stream = torch_stream(seed, "decoder batches")
    decoder.train()
    for _ in range(steps):
        rows = torch.randint(len(features), (batch_size,), generator=stream).to(features.device)
        loss = F.mse_loss(decoder((features[rows] - mean) / scale), images[rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    decoder.eval()

    def rebuild(wanted: Tensor) -> Tensor:
        with torch.no_grad():
            return decoder((wanted - mean) / scale)

    return rebuild


def search_images(
    encode: Callable[[Tensor], Tensor],
    wanted: Tensor,
    shape: tuple[int, int, int],
    *,
    steps: int = 500,
    lr: float = 0.1,
    smoothness: float = 1e-4,
) -> Tensor:
    """Run attack B: minimise the feature's mean squared error + total variation by Adam, from grey images.

    Args:
        encode: float images [B, C, H, W] on 0 to 1 to features [B, d].
        wanted: features [B, d]. shape: (C, H, W).
        steps, lr: of Adam.
        smoothness: weight of the total variation, the sum of absolute differences of neighbouring pixels. (Their mean,
            times 1e-4, would leave noise.)

    Returns:
        [B, C, H, W] on 0 to 1.
    """
    images = torch.full((len(wanted), *shape), 0.5, device=wanted.device, requires_grad=True)
    optimizer = torch.optim.Adam([images], lr)
    for _ in range(steps):
        errors = (encode(images) - wanted).square().mean(dim=1)
        variation = images.diff(dim=-1).abs().flatten(1).sum(1) + images.diff(dim=-2).abs().flatten(1).sum(1)
        optimizer.zero_grad()
        # The sum over images makes each search independent.
        (errors + smoothness * variation).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            images.clamp_(0, 1)
    return images.detach()


Attack = Callable[[FinishedRun, Weights, Tensor], Tensor]
"""(run, global model, features [B, d]) → images [B, C, H, W]."""


def inversion(run: FinishedRun) -> AnalysisResult:
    """Attack the global body by a decoder; see :func:`_attacked` for the result."""
    return _attacked(run, "decoder", _decode)


def inversion_search(run: FinishedRun) -> AnalysisResult:
    """Attack the global body by search; see :func:`_attacked` for the result."""
    return _attacked(run, "search", _search)


def _decode(run: FinishedRun, model: Weights, wanted: Tensor) -> Tensor:
    device = run.experiment.config.engine.device
    features, images = run.features(model, run.images).to(device), _pixels(run.images).to(device)
    return train_decoder(features, images, seed=run.experiment.config.seed)(wanted.to(device)).cpu()


def _search(run: FinishedRun, model: Weights, wanted: Tensor) -> Tensor:
    meta, module = run.experiment.dataset.meta, run.module(model)

    def encode(images: Tensor) -> Tensor:
        return module.features(normalise(images * 255, meta.mean, meta.std))

    return search_images(encode, wanted.to(run.experiment.config.engine.device), meta.shape).cpu()


def _pixels(images: Tensor) -> Tensor:
    """Return uint8 images as float32 on 0 to 1."""
    return images.to(torch.float32) / 255


# ------------------------------------------------------------------------------------------------------------- scores


@dataclass(frozen=True)
class Target:
    """A mean feature to attack.

    Attributes:
        size: its row in tables: ``1``, ``2``, ..., ``all`` (of the client's class), or ``fewest`` (all of the client
            that holds fewest of the class).
        label: the class.
        images: the averaged set, float [m, C, H, W] on 0 to 1.
        feature: its mean feature [d].
        class_mean: mean of all the client's images of the class, float [C, H, W].
    """

    size: str
    label: int
    images: Tensor
    feature: Tensor
    class_mean: Tensor


def group_means(
    features: Tensor, sizes: Sequence[int], groups: int, generator: np.random.Generator
) -> list[tuple[int, Tensor, Tensor]]:
    """Return per set m, its positions int64 [m] ascending and its mean feature [d].

    Args:
        features: [n, d], of one class.
        sizes: the m; those above n are left out.
        groups: distinct sets drawn for every m; fewer where there are fewer.
        generator: of the draw.
    """
    found = []
    for size in sizes:
        drawn: dict[tuple[int, ...], None] = {}
        for _ in range(4 * groups):  # equal sets are dropped, and small classes have few
            if len(drawn) < groups and size <= len(features):
                drawn[tuple(sorted(generator.choice(len(features), size, replace=False).tolist()))] = None
        for chosen in drawn:
            rows = torch.tensor(chosen)
            found.append((size, rows, features[rows].mean(dim=0)))
    return found


def _attacked(run: FinishedRun, name: str, attack: Attack) -> AnalysisResult:
    """Score an attack and the baseline.

    Returns:
        Rows per ``attack`` (``name``, and the baseline), ``m`` and ``against`` (``closest``, ``class mean``): ``n``
        attacked means, ``mse``, ``psnr`` in dB of that mean error, ``ssim``, ``accuracy`` (share of the rebuilt images
        that the body sees as their class). Arrays for a sheet, of up to eight classes and every m: ``truths`` (the
        closest image) and ``rebuilt`` uint8 [classes, sizes, C, H, W], ``guesses`` uint8 [classes, C, H, W],
        ``labels``, ``sizes`` text, ``class_names``.
    """
    model = run.global_model()
    assert model is not None  # see has_global_model
    targets = _targets(run, model)
    rebuilt = attack(run, model, torch.stack([target.feature for target in targets])).clamp(0, 1)
    means = {label: _pixels(run.images[run.labels == label]).mean(0) for label in {t.label for t in targets}}
    guessed = torch.stack([means[target.label] for target in targets])
    class_means = torch.stack([target.class_mean for target in targets])
    labels = torch.tensor([target.label for target in targets])
    closest = {}
    rows: list[Row] = []
    for which, images in ((name, rebuilt), (BASELINE, guessed)):
        pairs = zip(images, targets, strict=True)
        closest[which] = torch.stack([closest_image(image, target.images) for image, target in pairs])
        right = run.predictions(model, images * 255) == labels
        for against, truths in (("closest", closest[which]), ("class mean", class_means)):
            errors, likeness = squared_errors(images, truths), ssim(images, truths)
            for size in _sizes(targets):
                own = torch.tensor([target.size == size for target in targets])
                mse = float(errors[own].double().mean())
                scores = {"ssim": float(likeness[own].mean()), "accuracy": float(right[own].double().mean())}
                row: Row = {"attack": which, "m": size, "against": against, "n": int(own.sum())}
                rows.append({**row, "mse": mse, "psnr": psnr(mse), **scores})
    arrays = {**_sheet(targets, closest[name], rebuilt, guessed), "class_names": run.class_names}
    victims = "Victims: for each class the client that holds most of it; 'fewest': the one that holds fewest."
    return AnalysisResult(arrays, tuple(rows), (victims,))


def closest_image(image: Tensor, members: Tensor) -> Tensor:
    """Return the member of [m, C, H, W] with the smallest squared error to ``image`` [C, H, W]."""
    return members[int(squared_errors(members, image.expand_as(members)).argmin())]


def _targets(run: FinishedRun, model: Weights) -> list[Target]:
    """Return, by class, means over m of the client that holds most, and means of all that two clients hold."""
    counts = run.experiment.partition.counts
    tested = set(torch.unique(run.labels).tolist())
    present = [label for label in range(counts.shape[1]) if counts[:, label].any() and label in tested]
    targets = []
    for label in present[:MOST_CLASSES]:
        holders = np.flatnonzero(counts[:, label])
        most, fewest = (int(holders[pick(counts[holders, label])]) for pick in (np.argmax, np.argmin))
        stream = numpy_stream(run.experiment.config.seed, "inversion", label)
        for size, client in (("all", most), ("fewest", fewest)):
            stored = run.training_images(client, label)
            features, images = run.features(model, stored), _pixels(stored)
            mean_image = images.mean(dim=0)
            for m, rows, feature in group_means(features, SIZES, GROUPS, stream) if size == "all" else ():
                targets.append(Target(str(m), label, images[rows], feature, mean_image))
            targets.append(Target(size, label, images, features.mean(dim=0), mean_image))
    return targets


def _sizes(targets: Sequence[Target]) -> list[str]:
    used = {target.size for target in targets}
    return [size for size in (*map(str, SIZES), "all", "fewest") if size in used]


def _sheet(targets: Sequence[Target], truths: Tensor, rebuilt: Tensor, guessed: Tensor) -> Mapping[str, np.ndarray]:
    """Return the first mean of every size, for the first classes that have one of each."""
    sizes = _sizes(targets)
    first: dict[tuple[int, str], int] = {}
    for position, target in enumerate(targets):
        first.setdefault((target.label, target.size), position)
    classes = list(dict.fromkeys(target.label for target in targets))
    full = [label for label in classes if all((label, size) in first for size in sizes)][:8]
    rows = torch.tensor([[first[label, size] for size in sizes] for label in full], dtype=torch.int64)
    shape = (len(full), len(sizes), *truths.shape[1:])

    def stored(images: Tensor) -> np.ndarray:
        return (images * 255).round().to(torch.uint8).numpy()

    return {
        "truths": stored(truths[rows.flatten()]).reshape(shape),
        "rebuilt": stored(rebuilt[rows.flatten()]).reshape(shape),
        "guesses": stored(guessed[[first[label, sizes[0]] for label in full]]),
        "labels": np.array(full, dtype=np.int64),
        "sizes": np.array(sizes),
    }
