"""A covariance from the spread of clients' class means, where no second moment travels (FedCOF, 2412.14326)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flcore.math.prototypes.discriminant import ClassSums, Wire


def pack_means(sums: ClassSums, wire: Wire) -> dict[str, Tensor]:
    """Return sums as a message without second moment: ``classes`` [k], ``counts`` [k], ``sums`` [k, D].

    They are float32 unless ``wire`` is float64.
    """
    classes = sums.counts.nonzero().flatten()
    rows = sums.sums[classes]
    return {"classes": classes, "counts": sums.counts[classes], "sums": rows if wire == "float64" else rows.float()}


def unpack_means(arrays: Mapping[str, Tensor], num_classes: int) -> ClassSums:
    """Return the sums that a message gives, with a second moment as if each sample were its client's class mean."""
    classes, counts, rows = arrays["classes"], arrays["counts"].double(), arrays["sums"].double()
    held = rows.new_zeros(num_classes).index_copy_(0, classes, counts)
    sums = rows.new_zeros(num_classes, rows.shape[1]).index_copy_(0, classes, rows)
    return ClassSums(held, sums, _of_means(rows, counts))


def spread_of_means(totals: ClassSums, holders: Tensor) -> ClassSums:
    """Return sums with the covariance, within classes, of the clients' class means.

    A mean of n samples has 1/n of their covariance Σ, so that Σ_k n_kc (μ_kc − μ_c)(μ_kc − μ_c)ᵀ over the m_c clients
    of a class is (m_c − 1) Σ on average: the pooled estimate divides its sum over classes by Σ_c (m_c − 1).

    Args:
        totals: sums of :func:`unpack_means`. holders: m_c, int64 [C], the answers with samples of each class.
    """
    between = _of_means(totals.sums, totals.counts)
    degrees = (holders - 1).clamp_min(0).sum().clamp_min(1)
    within = (totals.second - between) / degrees
    return ClassSums(totals.counts, totals.sums, between + within * totals.counts.sum())


def _of_means(sums: Tensor, counts: Tensor) -> Tensor:
    """Return Σ_c s_c s_cᵀ / n_c of class sums [C, D] and counts [C]."""
    return (sums / counts.clamp_min(1e-300).unsqueeze(1)).mT @ sums
