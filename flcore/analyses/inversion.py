"""Can an image be rebuilt from a feature, and from a prototype (evaluation.md 5.3; FedPG figure 8, GFPL appendix B)?

Whoever holds the global model knows the body that made the features. Attack A trains a decoder on (feature, image)
pairs of the *test* split and shows it features of a client's *training* images: single ones, and means over m of one
class and client, which is what a prototype is. Attack B has no other images: it searches the pixels whose feature fits.

Scores are against the *closest* image of the averaged set (for m = 1 the true one) and against the mean image of the
client's class; beside them stands what anybody could guess without any feature: the class's mean image of the test
split. An attack that does not come closer than that guess learns nothing from the feature.

Deviation: the paper names only a "SqueezeNet model" as decoder; here transposed convolutions, d → 256 maps of 4×4 →
image, as the specification decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flcore.analyses.answers import ModelOutputs
from flcore.analyses.base import AnalysisResult, FinishedRun, Row, class_names
from flcore.analyses.image_scores import psnr, squared_errors, ssim
from flcore.core.rng import numpy_stream, seeded_globally, torch_stream
from flcore.data.images import normalise
from flcore.experiment.experiment import Experiment
from flcore.io.messages import Weights

SIZES = (1, 2, 3, 5, 10)
MOST_CLASSES = 20
GROUPS = 4
"""Means of every size and class."""

BASELINE = "class mean image"
DECODER_STEPS, DECODER_BATCH, DECODER_LR = 1000, 64, 1e-3
SEARCH_STEPS, SEARCH_LR, SEARCH_SMOOTHNESS = 500, 0.1, 1e-4
_WIDTHS = (256, 64, 32, 16)


@dataclass(frozen=True)
class Target:
    """A mean feature to attack.

    Attributes:
        size: what it stands for in tables: ``1``, ``2``, ..., ``all`` (of the client's class), or ``fewest`` (all of
            the client that holds fewest of the class).
        label: the class.
        images: float ``[m, C, H, W]`` on 0 to 1, the averaged set.
        feature: ``[d]``, its mean feature.
        class_mean: float ``[C, H, W]``, the mean image of all the client's images of the class.
    """

    size: str
    label: int
    images: Tensor
    feature: Tensor
    class_mean: Tensor


class Decoder(nn.Module):
    """Features ``[B, d]`` to images ``[B, C, H, W]`` on 0 to 1.

    Linear to 256 maps of 4×4, then transposed convolutions that double the size until the image fits in, of which the
    middle is taken.
    """

    def __init__(self, feature_dim: int, shape: tuple[int, int, int]) -> None:
        """For images of ``shape`` (C, H, W)."""
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


def group_means(
    features: Tensor, sizes: Sequence[int], groups: int, generator: np.random.Generator
) -> list[tuple[int, Tensor, Tensor]]:
    """Means over m features of one class, for every m.

    Args:
        features: ``[n, d]``.
        sizes: the m; those above n are left out.
        groups: sets drawn for every m without repetition within a set; fewer where there are fewer sets.
        generator: of the draw.

    Returns:
        Per set m, its positions int64 ``[m]`` ascending and its mean feature ``[d]``.
    """
    found = []
    for size in sizes:
        drawn: dict[tuple[int, ...], None] = {}
        for _ in range(4 * groups):  # sets drawn twice are dropped, and small classes have few
            if len(drawn) < groups and size <= len(features):
                drawn[tuple(sorted(generator.choice(len(features), size, replace=False).tolist()))] = None
        for chosen in drawn:
            rows = torch.tensor(chosen)
            found.append((size, rows, features[rows].mean(dim=0)))
    return found


def train_decoder(
    features: Tensor,
    images: Tensor,
    *,
    steps: int = DECODER_STEPS,
    batch_size: int = DECODER_BATCH,
    lr: float = DECODER_LR,
    seed: int = 0,
) -> Callable[[Tensor], Tensor]:
    """Attack A: learn to rebuild images from features by least squares (Adam, mini-batches with replacement).

    Args:
        features: ``[n, d]``, n >= 2, of the frozen body; standardised per dimension inside.
        images: float ``[n, C, H, W]`` on 0 to 1.
        steps: mini-batches. batch_size: of each, at least 2. lr: Adam's.
        seed: of initial weights and mini-batches; the global generator is put back.

    Returns:
        A function from features ``[B, d]`` to images ``[B, C, H, W]`` on 0 to 1, without gradient.
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
    steps: int = SEARCH_STEPS,
    lr: float = SEARCH_LR,
    smoothness: float = SEARCH_SMOOTHNESS,
) -> Tensor:
    """Attack B: the image whose feature fits, from grey: mean squared error of the feature + total variation, Adam.

    Args:
        encode: float images ``[B, C, H, W]`` on 0 to 1 to features ``[B, d]``.
        wanted: ``[B, d]``.
        shape: (C, H, W).
        steps: of Adam. lr: its learning rate. smoothness: weight of the total variation (the sum
            of absolute differences of neighbouring pixels: their mean, times 1e-4, would leave noise).

    Returns:
        ``[B, C, H, W]`` on 0 to 1.
    """
    images = torch.full((len(wanted), *shape), 0.5, device=wanted.device, requires_grad=True)
    optimizer = torch.optim.Adam([images], lr)
    for _ in range(steps):
        errors = (encode(images) - wanted).square().mean(dim=1)
        variation = images.diff(dim=-1).abs().flatten(1).sum(1) + images.diff(dim=-2).abs().flatten(1).sum(1)
        optimizer.zero_grad()
        # Summed over images, so that each is searched as if alone.
        (errors + smoothness * variation).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            images.clamp_(0, 1)
    return images.detach()


def inversion(run: FinishedRun) -> AnalysisResult:
    """Attack A on the global body, see :func:`_attacked` for what it leaves."""
    experiment = run.experiment

    def attack(answers: ModelOutputs, model: Weights, wanted: Tensor) -> Tensor:
        device = experiment.config.engine.device
        features, images = answers.features(model, answers.images).to(device), pixels(answers.images).to(device)
        return train_decoder(features, images, seed=experiment.config.seed)(wanted.to(device)).cpu()

    return _attacked(run, "decoder", attack)


def inversion_search(run: FinishedRun) -> AnalysisResult:
    """Attack B on the global body, see :func:`_attacked` for what it leaves."""
    experiment = run.experiment
    meta, device = experiment.dataset.meta, experiment.config.engine.device

    def attack(answers: ModelOutputs, model: Weights, wanted: Tensor) -> Tensor:
        module = answers.module(model)
        for parameter in module.parameters():
            parameter.requires_grad_(False)

        def encode(images: Tensor) -> Tensor:
            return module.features(normalise(images * 255, meta.mean, meta.std))

        return search_images(encode, wanted.to(device), meta.shape).cpu()

    return _attacked(run, "search", attack)


def pixels(images: Tensor) -> Tensor:
    """uint8 images as float32 on 0 to 1."""
    return images.to(torch.float32) / 255


def _attacked(
    run: FinishedRun,
    name: str,
    attack: Callable[[ModelOutputs, Weights, Tensor], Tensor],
) -> AnalysisResult:
    """An attack scored beside the guess that needs no feature.

    Rows per ``attack`` (``name``, and the guess), ``m`` and ``against`` (``closest``, ``class mean``): ``n`` attacked
    means, ``mse``, ``psnr`` in dB of that mean error, ``ssim``, ``accuracy`` (share of
    the rebuilt images that the body sees as their class).

    Arrays for a sheet, of up to eight classes and every m: ``truths`` (the closest image) and ``rebuilt`` uint8
    [classes, sizes, C, H, W], ``guesses`` uint8 [classes, C, H, W], ``labels``, ``sizes`` text, ``class_names``.
    """
    experiment = run.experiment
    answers = ModelOutputs(run)
    model = answers.global_model()
    assert model is not None  # see needs_global_model
    targets = _targets(experiment, answers, model)
    rebuilt = attack(answers, model, torch.stack([target.feature for target in targets])).clamp(0, 1)
    means = {label: pixels(answers.images[answers.labels == label]).mean(0) for label in {t.label for t in targets}}
    guessed = torch.stack([means[target.label] for target in targets])
    closest = torch.stack([closest_image(image, target.images) for image, target in zip(rebuilt, targets, strict=True)])
    nearest_guess = torch.stack(
        [closest_image(image, target.images) for image, target in zip(guessed, targets, strict=True)]
    )
    class_means = torch.stack([target.class_mean for target in targets])
    labels = torch.tensor([target.label for target in targets])
    rows: list[Row] = []
    for which, images, near in ((name, rebuilt, closest), (BASELINE, guessed, nearest_guess)):
        right = answers.predictions(model, images * 255) == labels
        for against, truths in (("closest", near), ("class mean", class_means)):
            errors, likeness = squared_errors(images, truths), ssim(images, truths)
            for size in _sizes(targets):
                own = torch.tensor([target.size == size for target in targets])
                mse = float(errors[own].double().mean())
                rows.append(
                    {
                        "attack": which,
                        "m": size,
                        "against": against,
                        "n": int(own.sum()),
                        "mse": mse,
                        "psnr": psnr(mse),
                        "ssim": float(likeness[own].mean()),
                        "accuracy": float(right[own].double().mean()),
                    }
                )
    sheet = _sheet(targets, closest, rebuilt, guessed)
    victims = "Victims: for each class the client that holds most of it; 'fewest': the one that holds fewest."
    return AnalysisResult({**sheet, "class_names": class_names(experiment)}, tuple(rows), (victims,))


def closest_image(image: Tensor, members: Tensor) -> Tensor:
    """The member of ``members`` [m, C, H, W] with the smallest squared error to ``image`` [C, H, W]."""
    return members[int(squared_errors(members, image.expand_as(members)).argmin())]


def _targets(experiment: Experiment, answers: ModelOutputs, model: Weights) -> list[Target]:
    """What is attacked, class by class: means over m of the client that holds most of it, and all that each has."""
    counts = experiment.partition.counts
    tested = set(torch.unique(answers.labels).tolist())
    held = [label for label in range(counts.shape[1]) if counts[:, label].any() and label in tested][:MOST_CLASSES]
    targets = []
    for label in held:
        holders = np.flatnonzero(counts[:, label])
        most, fewest = (int(holders[pick(counts[holders, label])]) for pick in (np.argmax, np.argmin))
        images = answers.training_images(most, label)
        features, shown = answers.features(model, images), pixels(images)
        stream = numpy_stream(experiment.config.seed, "inversion", label)
        mean_image = shown.mean(dim=0)
        for size, rows, feature in group_means(features, SIZES, GROUPS, stream):
            targets.append(Target(str(size), label, shown[rows], feature, mean_image))
        targets.append(Target("all", label, shown, features.mean(dim=0), mean_image))
        images = answers.training_images(fewest, label)
        shown, feature = pixels(images), answers.features(model, images).mean(dim=0)
        targets.append(Target("fewest", label, shown, feature, shown.mean(dim=0)))
    return targets


def _sizes(targets: Sequence[Target]) -> list[str]:
    used = {target.size for target in targets}
    return [size for size in (*map(str, SIZES), "all", "fewest") if size in used]


def _sheet(targets: Sequence[Target], truths: Tensor, rebuilt: Tensor, guessed: Tensor) -> Mapping[str, np.ndarray]:
    """The first mean of every size, for the first classes that have one of each."""
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
