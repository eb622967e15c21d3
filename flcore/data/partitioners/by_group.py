"""Natural partitions: by writer (FEMNIST) or by user (CelebA) (data.md, section 2.9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flcore.core.errors import DataError
from flcore.core.params import param
from flcore.data.partitioners.base import Assignment, Partitioner, check_request, merge_indices


@dataclass(frozen=True)
class ByGroup(Partitioner):
    """One client per writer, user or site, or per ``merge`` of them, drawn by chance. Groups are never divided."""

    name: ClassVar[str] = "by_group"
    summary: ClassVar[str] = "natural: one client per writer, user or site of the dataset, or per several merged"

    min_size: int = param(10, "groups with fewer samples than this are dropped", low=1)
    merge: int = param(1, "groups that are merged into one client", low=1)

    def split(
        self, labels: np.ndarray, num_clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> Assignment:
        check_request(labels, num_clients)
        if groups is None:
            raise DataError(
                "partition.name = by_group: the dataset has no groups; use one that names writers or users, or images "
                "by site (data.name=imagefolder with data.layout=sites or csv)"
            )
        identifiers, sizes = np.unique(groups, return_counts=True)
        eligible = identifiers[sizes >= self.min_size]
        needed = num_clients * self.merge
        if needed > len(eligible):
            raise DataError(
                f"partition.num_clients = {num_clients}: needs {needed} groups of at least {self.min_size} samples; "
                f"the dataset has {len(eligible)}; the largest number possible is {len(eligible) // self.merge}"
            )
        # Drawn, then put in order of identifier: client numbers follow the dataset's own order.
        chosen = np.sort(rng.choice(eligible, size=needed, replace=False)).reshape(num_clients, self.merge)
        members = np.split(np.argsort(groups, kind="stable"), np.cumsum(sizes)[:-1])
        clients = [merge_indices([members[place] for place in np.searchsorted(identifiers, group)]) for group in chosen]
        note = f"by_group: {needed} of {len(identifiers)} groups used, {len(identifiers) - len(eligible)} are too small"
        return Assignment(clients, complete=needed == len(identifiers), notes=(note,))
