"""Class means of features, on the CPU and as a GPU would take them (baselines.md section 15)."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flcore.math.prototypes.class_means import class_means, class_sums


def test_class_means() -> None:
    """Class 0: ((1,2) + (3,4))/2 = (2,3); class 2: (5,6); class 1 has no sample."""
    features = torch.tensor([[1.0, 2.0], [5.0, 6.0], [3.0, 4.0]])
    found = class_means(features, torch.tensor([0, 2, 0]), 4)
    assert found.means.tolist() == [[2, 3], [0, 0], [5, 6], [0, 0]]
    assert found.present.tolist() == [True, False, True, False]


class Listening(TorchDispatchMode):
    """Notes the operations carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_on_a_gpu_nothing_is_added_without_order() -> None:
    """`index_add_` and `bincount` use atomic additions there; fake tensors run what would run."""
    with FakeTensorMode(), Listening() as heard:
        found = class_means(torch.zeros(5, 2, device="cuda"), torch.zeros(5, dtype=torch.int64, device="cuda"), 3)
    assert (found.means.shape, found.means.dtype, found.means.device.type) == ((3, 2), torch.float32, "cuda")
    assert (found.present.shape, found.present.dtype) == ((3,), torch.bool)
    assert "mm" in heard.names
    assert heard.names.isdisjoint({"index_add", "index_add_", "scatter_add", "scatter_add_", "bincount"})


def test_sums_by_class_of_a_stack() -> None:
    """Two clients of three samples, the last of the second is padding: sums (1 + 3, 2) and (10, 20), counts alike."""
    features = torch.tensor([[[1.0], [2.0], [3.0]], [[10.0], [20.0], [40.0]]])
    labels, weight = torch.tensor([[0, 2, 0], [0, 2, 2]]), torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    sums, counts = class_sums(features, labels, 3, weight)
    assert sums[..., 0].tolist() == [[4, 0, 2], [10, 0, 20]]
    assert counts.tolist() == [[2, 0, 1], [1, 0, 1]]
    assert sums.dtype == counts.dtype == torch.float64
    unweighted, all_counts = class_sums(features, labels, 3)
    assert unweighted[1, :, 0].tolist() == [10, 0, 60] and all_counts[1].tolist() == [1, 0, 2]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-50, 50)), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_means_of_any_samples(samples: list[tuple[int, int]]) -> None:
    labels = torch.tensor([label for label, _ in samples])
    features = torch.tensor([[float(value)] for _, value in samples])
    found = class_means(features, labels, 4)
    for c in range(4):
        own = [value for label, value in samples if label == c]
        assert bool(found.present[c]) == bool(own)
        expected = sum(own) / len(own) if own else 0.0
        assert abs(found.means[c].item() - expected) < 1e-5
