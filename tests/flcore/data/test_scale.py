"""10,000 clients on 60,000 samples: memory is bounded; seconds are printed, not judged."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flcore.data.dataset import Dataset
from flcore.data.dividing import make_partition
from flcore.data.partition import Partition
from flcore.data.partitioners.base import Partitioner
from flcore.data.partitioners.classes_per_client import ClassesPerClient
from flcore.data.partitioners.dirichlet import Dirichlet
from flcore.data.partitioners.simple import ByGroup, Dominant, Iid, Shards
from flcore.data.partitioners.ways_shots import WaysShots
from flcore.data.summary import summarise_partition

CLIENTS = 10_000

KINDS: list[Partitioner] = [
    Iid(),
    Dirichlet(alpha=1.0, min_size=1),
    Dirichlet(alpha=1.0, variant="equalised"),
    ClassesPerClient(),
    Dominant(),
    Shards(),
    WaysShots(shots=2, shots_spread=1),
    ByGroup(min_size=1),
]


@pytest.mark.slow
@pytest.mark.parametrize("partitioner", KINDS, ids=repr)
def test_ten_thousand_clients(partitioner: Partitioner, with_labels: Callable[..., Dataset], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = with_labels(rng.integers(0, 10, 60_000), rng.integers(0, 10, 10_000), 10)
    started = time.perf_counter()
    make_partition(data, partitioner, num_clients=CLIENTS, seed=0).save(tmp_path)
    loaded = Partition.load(tmp_path)
    seconds = time.perf_counter() - started
    summarise_partition(loaded)

    tracemalloc.start()
    make_partition(data, partitioner, num_clients=CLIENTS, seed=0).save(tmp_path)
    again = Partition.load(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{partitioner.name}: {seconds:.1f} s, {peak / 1e6:.0f} MB")
    assert again.num_clients == CLIENTS and again.fingerprint == loaded.fingerprint
    assert peak < 500e6
