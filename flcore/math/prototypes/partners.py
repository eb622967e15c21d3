"""Partners of prototypes for FedCSPC's mixing: of the same client and class, and of another class (fedcspc.md, 5.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Drawn:
    """Partners of n prototypes: ``same`` and ``other`` int64 [n, m], and ``usable`` bool [n, 1].

    ``other`` has another label; where no prototype has one, the row is not usable.
    """

    same: Tensor
    other: Tensor
    usable: Tensor

    def rows(self, rows: Tensor) -> Drawn:
        return Drawn(self.same[rows], self.other[rows], self.usable[rows])


class Partners:
    """Draws for each prototype u_i partners u_j, u_k from its client's whole set.

    j has the label of i and is not i, unless i is alone: then j = i. k has another label; if the client has only one
    class, k comes from all clients.
    """

    def __init__(self, labels: Tensor, sources: Tensor) -> None:
        """Index prototypes by client and label; ``labels`` and ``sources`` (clients) are int64 ``[n]``, n >= 1."""
        self._device = labels.device
        labels, sources = labels.cpu(), sources.cpu()
        self._by_source = _Layout(sources, labels)
        self._by_label = _Layout(torch.zeros_like(labels), labels)
        self._lonely = (self._by_source.outside == 0).unsqueeze(1)
        self._usable = (self._by_label.outside > 0).unsqueeze(1)

    def draw(self, count: int, generator: torch.Generator) -> Drawn:
        """Draw ``count`` partners of each kind for every prototype, on the labels' device."""
        shape = (len(self._usable), count)
        same, other = (torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        anywhere, own = self._by_label.pick_outside(other), self._by_source.pick_outside(other)
        chosen = self._by_source.pick_inside(same), torch.where(self._lonely, anywhere, own), self._usable
        return Drawn(*(tensor.to(self._device) for tensor in chosen))


class _Layout:
    """Items sorted by group and, within it, by label: a label of a group is a range, the rest of the group two."""

    def __init__(self, groups: Tensor, labels: Tensor) -> None:
        cells = groups * (int(labels.max()) + 1) + labels
        self._order = torch.argsort(cells, stable=True)
        self._rank = torch.argsort(self._order)
        self._cell = _bounds(cells[self._order], cells)
        self._group = _bounds(groups[self._order], groups)
        self.outside = (self._group[1] - self._group[0]) - (self._cell[1] - self._cell[0])

    def pick_inside(self, uniform: Tensor) -> Tensor:
        """Return others of each item's group and label by uniform numbers [n, m]; the item itself where it is alone."""
        start, end = (bound.unsqueeze(1) for bound in self._cell)
        place = start + (uniform * (end - start - 1)).long()
        alone = end - start == 1
        return self._order[torch.where(alone, start, place + (place >= self._rank.unsqueeze(1)).long())]

    def pick_outside(self, uniform: Tensor) -> Tensor:
        """Return items of each item's group with other labels by uniform numbers [n, m]; any where there is none."""
        start, end = (bound.unsqueeze(1) for bound in self._cell)
        place = self._group[0].unsqueeze(1) + (uniform * self.outside.unsqueeze(1)).long()
        place = torch.where(place >= start, place + (end - start), place)
        return self._order[place.clamp_max(len(self._order) - 1)]


def _bounds(ordered: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return torch.searchsorted(ordered, values), torch.searchsorted(ordered, values, right=True)
