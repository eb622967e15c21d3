"""Linear heads from sums: class counts, class sums and one second moment of all features.

The head does not depend on how samples are divided among clients (AFL, He et al., CVPR 2025; Fed3R, Fani et al., ICML
2024; FedCGS, 2025). Everything is float64. Features are standardised by their own summed moments, and the head includes
the standardisation: it reads raw features.

Where a second moment is too large to send (protolda.md section 3), X of (S_w + λI) X = μᵀ is approximated in the span
of blocks of directions; each costs every client one product of its second moment with C vectors, 2·D·C numbers. After
each block the minimum over *all* directions is taken, and its residual gives the next block (a block Krylov space): far
fewer blocks than conjugate gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flcore.core.portable import square_root
from flcore.math.prototypes.gaussians import from_upper_triangles, upper_triangles

Wire = Literal["float64", "float32", "float16", "int8"]
"""Precision of a second moment in a message, see :func:`pack_sums`."""

LinearMap = tuple[Tensor, Tensor]
"""Weight float64 [C, D] and bias [C]."""

GRID = tuple(10.0 ** (exponent / 2) for exponent in range(-10, 1))
"""Values of λ for :func:`cross_validated`: 1e-5 to 1, two per decade."""

ROUNDING: Mapping[Wire, float] = {"float64": 0.0, "float32": 0.0, "float16": 1e-3, "int8": 1e-3}
"""The least λ of :data:`GRID` that is above the rounding of a second moment of 1,000 features, from tens of clients."""

NEVER = -1e4
"""The bias of a class without samples: it never wins."""


@dataclass(frozen=True)
class Margins:
    """Counts, class sums and the diagonal of a second moment, with shares, means and deviations.

    Attributes:
        counts: float64 [C], samples of each class.
        sums: float64 [C, D], features by class.
        squares: float64 [D], Σ f².
    """

    counts: Tensor
    sums: Tensor
    squares: Tensor

    @property
    def shares(self) -> Tensor:
        return self.counts / self.counts.sum()

    @property
    def held(self) -> Tensor:
        return self.counts > 0

    @property
    def mean(self) -> Tensor:
        return self.sums.sum(0) / self.counts.sum()

    @property
    def scale(self) -> Tensor:
        """Deviations [D]; infinite for constant features, which are thereby left out: their deviation is rounding."""
        variance = self.squares / self.counts.sum() - self.mean.square()
        return torch.where(
            variance > 1e-12 * (1 + self.mean.square()), square_root(variance.clamp_min(1e-30)), torch.inf
        )

    @property
    def class_means(self) -> Tensor:
        """Class means of standardised features, [C, D]; 0 for classes without samples."""
        means = self.sums / self.counts.clamp_min(1e-300).unsqueeze(1) - self.mean
        return torch.where(self.held.unsqueeze(1), means / self.scale, 0.0)


@dataclass(frozen=True)
class ClassSums:
    """The sums over samples that a linear discriminant needs.

    Attributes:
        counts: float64 [C], samples of each class, or the sum of their weights.
        sums: float64 [C, D], features summed by class.
        second: float64 [D, D], Σ f fᵀ.
    """

    counts: Tensor
    sums: Tensor
    second: Tensor

    def __add__(self, other: ClassSums) -> ClassSums:
        return ClassSums(self.counts + other.counts, self.sums + other.sums, self.second + other.second)

    def __sub__(self, other: ClassSums) -> ClassSums:
        """Remove samples: exact forgetting."""
        return ClassSums(self.counts - other.counts, self.sums - other.sums, self.second - other.second)

    @property
    def margins(self) -> Margins:
        return Margins(self.counts, self.sums, self.second.diagonal())

    @property
    def covariance(self) -> Tensor:
        """Covariance of the standardised features, [D, D]."""
        mean, scale = self.margins.mean, self.margins.scale
        return (self.second / self.counts.sum() - torch.outer(mean, mean)) / torch.outer(scale, scale)

    @classmethod
    def nothing(cls, num_classes: int, dim: int) -> ClassSums:
        zeros = torch.zeros(num_classes, dim, dtype=torch.float64)
        return cls(zeros[:, 0].clone(), zeros, torch.zeros(dim, dim, dtype=torch.float64))


def discriminant_sums(features: Tensor, labels: Tensor, num_classes: int, weights: Tensor | None = None) -> ClassSums:
    """Return the sums of samples: ``features`` [n, D], ``labels`` int64 [n], ``weights`` by class [C] (None: 1)."""
    rows = features.double()
    own = torch.ones(len(rows), dtype=torch.float64) if weights is None else weights.double()[labels]
    weighted = rows if weights is None else rows * own.unsqueeze(1)
    sums = rows.new_zeros(num_classes, rows.shape[1]).index_add_(0, labels, weighted)
    counts = rows.new_zeros(num_classes).index_add_(0, labels, own.to(rows.device))
    return ClassSums(counts, sums, weighted.mT @ rows)


def discriminant(totals: ClassSums, shrinkage: float, *, noisy: bool = False) -> LinearMap:
    """Return Fisher's linear discriminant with one covariance for all classes (protolda.md section 3).

    With standardised features, class means μ_c, shares π_c and the covariance S_w within classes: w_c = (S_w + λI)⁻¹
    μ_c and b_c = −μ_c·w_c/2 + log π_c. ``totals`` are of one sample or more; ``shrinkage`` is λ > 0; with ``noisy``
    totals negative eigenvalues of S_w count as 0. Classes without samples have zero weights and the bias :data:`NEVER`.
    """
    return head(solutions(totals, shrinkage, noisy=noisy), totals.margins)


def solutions(totals: ClassSums, shrinkage: float, *, noisy: bool = False) -> Tensor:
    """Return (S_w + λI)⁻¹ μᵀ, [D, C], of :func:`discriminant`."""
    margins = totals.margins
    means = margins.class_means
    within = totals.covariance - (margins.shares.unsqueeze(1) * means).mT @ means
    return _solved(within, shrinkage, means.mT, noisy=noisy)


def head(solution: Tensor, margins: Margins) -> LinearMap:
    """Return the discriminant of directions X = (S_w + λI)⁻¹ μᵀ, [D, C], as :func:`discriminant` does."""
    bias = margins.shares.log() - (margins.class_means * solution.mT).sum(1) / 2
    weight = torch.where(margins.held.unsqueeze(1), solution.mT, 0.0)
    return unfolded_head(weight, bias, margins)


def ridge(totals: ClassSums, shrinkage: float, *, noisy: bool = False) -> LinearMap:
    """Regress on the classes' indicators as :func:`discriminant`: (T + λI)⁻¹ cov(z, y) for standardised features z."""
    margins = totals.margins
    joint = (margins.shares.unsqueeze(1) * margins.class_means).mT
    directions = _solved(totals.covariance, shrinkage, joint, noisy=noisy).mT
    return unfolded_head(directions, margins.shares, margins)


def cross_validated(totals: ClassSums, grid: Sequence[float]) -> float:
    """Return the λ of the ridge regression with the least generalised cross-validation (Golub, Heath, Wahba, 1979).

    GCV(λ) = Σ_c |y_c − ŷ_c|²/n / (1 − tr H/n)²; the numerator is the indicators' variance minus the part that the
    eigenvectors of T explain. Needs the sums of n > 1 samples alone: no extra byte, no test data.
    """
    margins, number = totals.margins, float(totals.counts.sum())
    shares = margins.shares
    values, vectors = torch.linalg.eigh(totals.covariance)
    values = values.clamp_min(0)
    joint = (
        (vectors.mT @ (shares.unsqueeze(1) * totals.margins.class_means).mT).square().sum(1)
    )  # Σ_c of squared covariances, by direction
    variance = float((shares * (1 - shares)).sum())

    def score(shrinkage: float) -> float:
        kept = values / (values + shrinkage)
        residual = variance - float((joint * (values + 2 * shrinkage) / (values + shrinkage).square()).sum())
        return residual / max(1 - (float(kept.sum()) + 1) / number, 1e-9) ** 2

    return min(grid, key=score)


def reweighted(bias: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return a discriminant's biases for other class shares: b + log π' − log π; classes without a share never win.

    ``before`` and ``after`` are counts [C], maybe on different devices.
    """
    after = after.to(before.device)
    held = (before > 0) & (after > 0)
    shift = (after / after.sum()).log() - (before / before.sum()).log()
    return torch.where(held, bias + shift.to(bias.dtype), NEVER)


def _solved(matrix: Tensor, shrinkage: float, right: Tensor, *, noisy: bool) -> Tensor:
    """Return (A + λI)⁻¹ B for a symmetric A [D, D] and B [D, C]; negative eigenvalues of A count as 0.

    Without noise they are of the size of rounding, so that a Cholesky factor is tried first. With noise an eigenvalue
    may be just above −λ, and its inverse arbitrarily large.
    """
    if not noisy:
        factor, failed = torch.linalg.cholesky_ex(matrix + shrinkage * torch.eye(len(matrix), dtype=matrix.dtype))
        if not failed:
            return torch.cholesky_solve(right, factor)
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ ((vectors.mT @ right) / (values.clamp_min(0) + shrinkage).unsqueeze(1))


def unfolded_head(weight: Tensor, bias: Tensor, margins: Margins) -> LinearMap:
    """Turn a head of standardised features into one of raw features; classes without samples get :data:`NEVER`."""
    unscaled = weight / margins.scale
    return unscaled, torch.where(margins.held, bias, NEVER) - unscaled @ margins.mean


def pack_sums(sums: ClassSums, wire: Wire, *, every: bool = False) -> dict[str, Tensor]:
    """Return sums as a message: the k classes that have samples (or ``every`` class), and the second moment.

    ``float64``: the upper triangle. Else the second moment about the client's mean: variances float32 [D] and either
    correlations (strict upper triangle, float32 or float16) or, as ``int8``, the rows of its Cholesky factor, each
    scaled by its largest entry. Correlations rounded to 8 bits may not be positive definite; a factor's product always
    is.

    Returns:
        ``classes`` int64 [k], ``counts`` float64 [k], ``sums`` [k, D] (float32 unless ``wire`` is float64), and
            ``second``,
        or ``variances`` with ``correlations`` or ``factor`` int8 [D(D + 1)/2] and ``scales`` float32 [D].
    """
    classes = torch.arange(len(sums.counts)) if every else sums.counts.nonzero().flatten()
    common = {"classes": classes, "counts": sums.counts[classes]}
    if wire == "float64":
        return {**common, "sums": sums.sums[classes], "second": upper_triangles(sums.second)}
    rounded = sums.sums[classes].float()
    # About the mean that the receiver computes from what it is sent.
    mean = rounded.double().sum(0) / sums.counts.sum()
    about = sums.second - torch.outer(mean, mean) * sums.counts.sum()
    variances = about.diagonal().clamp_min(0)
    scale = torch.where(variances > 0, square_root(variances), 1.0)
    correlations = about / torch.outer(scale, scale)
    common |= {"sums": rounded, "variances": variances.float()}
    if wire == "int8":
        rows = _factor(correlations, variances > 0)
        largest = rows.abs().amax(1).clamp_min(1e-30)
        steps = (rows / largest.unsqueeze(1) * 127).round().to(torch.int8)
        return {**common, "factor": steps[*_lower(len(steps))], "scales": (largest / 127).float()}
    own = torch.float16 if wire == "float16" else torch.float32
    return {**common, "correlations": upper_triangles(correlations, 1).to(own)}


def unpack_sums(arrays: Mapping[str, Tensor], num_classes: int) -> ClassSums:
    """Return the inverse of :func:`pack_sums`, to the wire's precision."""
    classes, counts = arrays["classes"], arrays["counts"]
    rows = arrays["sums"].double()
    sums = rows.new_zeros(num_classes, rows.shape[1]).index_copy_(0, classes, rows)
    held = rows.new_zeros(num_classes).index_copy_(0, classes, counts.double())
    if "second" in arrays:
        return ClassSums(held, sums, from_upper_triangles(arrays["second"]))
    mean = rows.sum(0) / counts.sum()
    variances = arrays["variances"].double()
    if "factor" in arrays:
        factor = rows.new_zeros(len(variances), len(variances))
        factor[*_lower(len(variances))] = arrays["factor"].double()
        factor *= arrays["scales"].double().unsqueeze(1)
        about = factor @ factor.mT
    else:
        about = from_upper_triangles(arrays["correlations"].double(), 1)
    about.diagonal().copy_((variances > 0).double())
    scale = square_root(variances)
    return ClassSums(held, sums, about * torch.outer(scale, scale) + torch.outer(mean, mean) * counts.sum())


def add_sums(parts: Iterable[ClassSums], start: ClassSums) -> ClassSums:
    """Add sums in the order given, in memory for one."""
    counts, sums, second = start.counts.clone(), start.sums.clone(), start.second.clone()
    for part in parts:
        counts += part.counts
        sums += part.sums
        second += part.second
    return ClassSums(counts, sums, second)


def _lower(dim: int) -> tuple[Tensor, Tensor]:
    first, second = torch.tril_indices(dim, dim)
    return first, second


def _factor(correlations: Tensor, varies: Tensor) -> Tensor:
    """Return a lower Cholesky factor of correlations [D, D], maybe singular, by the least jitter that gives one.

    If noise leaves none, negative eigenvalues count as 0 and the diagonal is scaled to 1 again. Features without a
    variance (``varies``, bool [D]) are replaced by the unit matrix; their rows are never read.
    """
    unit = torch.eye(len(correlations), dtype=correlations.dtype)
    for jitter in (0.0, 1e-8, 1e-6, 1e-4, 1e-2):
        factor, failed = torch.linalg.cholesky_ex(correlations + jitter * unit)
        if not failed:
            return factor
    values, vectors = torch.linalg.eigh(torch.where(varies.unsqueeze(1) & varies, correlations, unit))
    # A root M of the matrix, M Mᵀ, and with Mᵀ = Q R also Rᵀ R.
    lower = torch.linalg.qr((vectors * square_root(values.clamp_min(0))).mT).R.mT
    return lower / lower.norm(dim=1, keepdim=True).clamp_min(1e-30)


_NOTHING_LEFT = 1e-9  # relative to the first residual: directions of that size are rounding


def directions(block: Tensor, margins: Margins) -> Tensor:
    """Turn standardised directions [D, m] into vectors of raw features."""
    return block / margins.scale.unsqueeze(1)


def standardised_products(vectors: Tensor, products: Tensor, margins: Margins) -> Tensor:
    """Return T V, the covariance of standardised features times V, from products Σ f (fᵀu) with ``vectors`` u.

    ``vectors`` [D, m] are from :func:`directions`; ``products`` [D, m] are summed over all clients.
    """
    mean = margins.mean
    centred = products / margins.counts.sum() - torch.outer(mean, mean @ vectors)
    return centred / margins.scale.unsqueeze(1)


def solved(
    basis: Tensor, products: Tensor, margins: Margins, shrinkage: float, *, noisy: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the best X in the span of the basis, and the residual μᵀ − (S_w + λI) X, both [D, C].

    ``basis`` V, standardised, and ``products`` T V are [D, m]; ``margins`` are of all clients; ``shrinkage`` is λ > 0.
    With ``noisy`` products negative eigenvalues of S_w in that span count as 0; the basis must then be of independent
    directions, as :func:`next_block` returns them.
    """
    means, shares = margins.class_means, margins.shares
    applied = products - means.mT @ (shares.unsqueeze(1) * (means @ basis)) + shrinkage * basis
    gram = basis.mT @ applied
    gram, joint = (gram + gram.mT) / 2, basis.mT @ means.mT
    if noisy:
        orthonormal = torch.linalg.inv(torch.linalg.qr(basis).R)  # the basis times this is
        values, vectors = torch.linalg.eigh(orthonormal.mT @ gram @ orthonormal)
        axes = orthonormal @ vectors
        coefficients = axes @ ((axes.mT @ joint) / values.clamp_min(shrinkage).unsqueeze(1))
    else:
        coefficients = torch.linalg.lstsq(gram, joint, driver="gelsd").solution
    return basis @ coefficients, means.mT - applied @ coefficients


def next_block(basis: Tensor, residual: Tensor, first: float) -> Tensor:
    """Return orthonormal directions of a residual outside the basis, [D, k], k ≤ C; k = 0 if nothing is left.

    ``basis`` [D, m], m may be 0; ``residual`` [D, C]; ``first`` is the largest singular value of the first residual.
    """
    rest = residual
    if basis.shape[1]:
        orthonormal = torch.linalg.qr(basis).Q
        for _ in range(2):  # once is not enough in floating point
            rest = rest - orthonormal @ (orthonormal.mT @ rest)
    vectors, sizes, _ = torch.linalg.svd(rest, full_matrices=False)
    return vectors[:, sizes > _NOTHING_LEFT * first]
