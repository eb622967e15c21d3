"""Properties of every partitioner (data.md, part 4) and what they refuse."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from flcore.core.errors import ConfigError, DataError
from flcore.core.params import build
from flcore.data.partitioners.base import Assignment, Partitioner, split_by_shares
from flcore.data.partitioners.classes_per_client import ClassesPerClient
from flcore.data.partitioners.dirichlet import Dirichlet
from flcore.data.partitioners.simple import ByGroup, Dominant, Iid, Shards
from flcore.data.partitioners.ways_shots import WaysShots
from tests.cases import quick

bounded = settings(max_examples=5, deadline=None, derandomize=True)


def stream(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def class_counts(labels: np.ndarray, assignment: Assignment) -> np.ndarray:
    return np.stack([np.bincount(labels[own], minlength=labels.max() + 1) for own in assignment.clients])


def balanced(num_classes: int, per_class: int) -> np.ndarray:
    """Labels in mixed order, so that nothing can rely on a sorted file."""
    return np.tile(np.arange(num_classes), per_class)


@st.composite
def unbalanced_labels(draw: st.DrawFn) -> np.ndarray:
    """200 to 3000 labels of 2 to 20 classes, every class present, unequal counts, in random order."""
    num_classes = draw(st.integers(2, 20))
    total = draw(st.integers(200, 3000))
    rng = stream(draw(st.integers(0, 2**32 - 1)))
    weights = rng.uniform(0.2, 1, num_classes)
    labels = rng.choice(num_classes, size=total - num_classes, p=weights / weights.sum())
    return rng.permutation(np.concatenate([np.arange(num_classes), labels]))


seeds = st.integers(0, 2**32 - 1)

ANY_NUMBER_OF_CLIENTS: list[Partitioner] = [
    Iid(),
    Iid(stratified=True),
    Dirichlet(alpha=1.0, min_size=1),
    Dirichlet(alpha=1.0, variant="plain"),
    Dirichlet(alpha=1.0, variant="subsampled", ratio=0.5, min_size=1),
    Dirichlet(alpha=1.0, variant="equalised", min_size=1),
    Dirichlet(alpha=1.0, variant="plain", tasks=3, min_size=1),
    ClassesPerClient(rule="nbench"),
    Shards(shards=2),
    Shards(shards=2, tasks=3),
    WaysShots(ways=2, shots=3, ways_spread=1, shots_spread=1, kind="uniform"),
    WaysShots(ways=2, shots=2, ways_spread=1, shots_spread=1, kind="normal"),
    ByGroup(min_size=1),
]
# It draws many times until every task of every client has enough.
BALANCED_TASKS = Dirichlet(alpha=1.0, variant="balanced", tasks=3, min_size=1, nested=True)
# These need a number of clients that goes with the number of classes.
WHOLE_CLASSES: list[Partitioner] = [ClassesPerClient(), ClassesPerClient(classes=1), Dominant(), Dominant(share=0.5)]
# A rare class cannot be shared by many clients, few samples cannot fill many tasks; no other refusal is valid.
REFUSALS = ("training samples for", "which has", "would get no samples", "attempts for")


@pytest.mark.parametrize("cases", [5, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("partitioner", quick([*ANY_NUMBER_OF_CLIENTS, *WHOLE_CLASSES, BALANCED_TASKS], 17), ids=repr)
def test_every_partitioner_keeps_its_promises(partitioner: Partitioner, cases: int) -> None:
    """Valid and disjoint indices, complete where promised, the same again, no global randomness; or a clean refusal."""

    @settings(max_examples=cases, deadline=None, derandomize=cases == 5, database=None)
    @given(labels=unbalanced_labels(), num_clients=st.integers(2, 20), seed=seeds)
    def check(labels: np.ndarray, num_clients: int, seed: int) -> None:
        if partitioner in WHOLE_CLASSES:
            num_clients = (1 + num_clients % 3) * int(labels.max() + 1)
        groups, before = np.arange(len(labels)) % 41, np.random.get_state()[1].copy()  # type: ignore[index]
        try:
            made = partitioner.split(labels, num_clients, stream(seed), groups)
        except DataError as error:
            if not any(words in str(error) for words in REFUSALS):
                raise
            reject()
        assert len(made.clients) == num_clients
        for own in made.clients:
            assert own.dtype == np.int64 and len(own) >= 1
            assert (np.diff(own) > 0).all() and own[0] >= 0 and own[-1] < len(labels)
        everything = np.concatenate(made.clients)
        if not made.overlap:
            assert len(np.unique(everything)) == len(everything)
        if made.complete:
            assert (class_counts(labels, made).sum(axis=0) == np.bincount(labels)).all()
        for own, tasks in zip(made.clients, made.tasks or (), strict=made.tasks is not None):
            assert np.array_equal(own, np.sort(np.concatenate(tasks))) and min(map(len, tasks)) >= 1
        again = partitioner.split(labels, num_clients, stream(seed), groups)
        assert all(np.array_equal(a, b) for a, b in zip(made.clients, again.clients, strict=True))
        assert np.array_equal(before, np.random.get_state()[1])  # type: ignore[index]

    check()


COUNTS_DEPEND_ON_CLASS_SIZES_ONLY: list[Partitioner] = [
    Iid(stratified=True),
    Dirichlet(alpha=1.0, min_size=1),
    Dirichlet(alpha=1.0, variant="plain", tasks=2, min_size=1),
    Dirichlet(alpha=1.0, variant="subsampled", ratio=0.5, min_size=1),
    ClassesPerClient(),
    Dominant(),
    Shards(tasks=2),
    WaysShots(shots=10),
    ByGroup(min_size=1),
]


@pytest.mark.parametrize("partitioner", COUNTS_DEPEND_ON_CLASS_SIZES_ONLY, ids=repr)
@given(seed=st.integers(0, 1000))
@bounded
def test_class_counts_do_not_depend_on_the_order_of_rows(partitioner: Partitioner, seed: int) -> None:
    labels, groups = balanced(5, 60), np.arange(300) % 41
    order = stream(seed).permutation(300)
    one = class_counts(labels, partitioner.split(labels, 10, stream(seed), groups))
    other = class_counts(labels[order], partitioner.split(labels[order], 10, stream(seed), groups[order]))
    assert np.array_equal(one, other)


@pytest.mark.parametrize("partitioner", [*ANY_NUMBER_OF_CLIENTS, ClassesPerClient(), Dominant()], ids=repr)
def test_another_seed_gives_another_partition(partitioner: Partitioner) -> None:
    labels, groups = balanced(10, 60), np.arange(600) % 41
    one, other = (partitioner.split(labels, 10, stream(seed), groups).clients for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("num_clients", "words"), [(0, "at least 1 client"), (21, "the largest number possible is")])
def test_no_clients_and_too_many_clients_are_refused(num_clients: int, words: str) -> None:
    for partitioner in (*ANY_NUMBER_OF_CLIENTS, ClassesPerClient(), Dominant()):
        with pytest.raises(DataError, match=words):
            partitioner.split(balanced(2, 10), num_clients, stream(0), np.arange(20))


def test_cut_as_computed_in_its_docstring() -> None:
    parts = split_by_shares(np.arange(10), np.array([0.25, 0.25, 0.5]))
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3, 4], [5, 6, 7, 8, 9]]


def test_cut_gives_nothing_to_a_last_part_without_a_share() -> None:
    """0.7 + 0.2 + 0.1 is 0.9999999999999999 in binary: without the guard the last part would get a sample."""
    shares = np.array([0.7, 0.2, 0.1, 0.0])
    assert np.cumsum(shares)[2] < 1
    assert [len(part) for part in split_by_shares(np.arange(10), shares)] == [7, 2, 1, 0]


@bounded
@given(st.integers(0, 500), st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_cut_covers_in_order_with_sizes_close_to_the_shares(total: int, weights: list[float]) -> None:
    assume(sum(weights) > 0.01)
    shares = np.array(weights) / sum(weights)
    parts = split_by_shares(np.arange(total), shares)
    assert np.array_equal(np.concatenate(parts), np.arange(total))
    off = np.abs([len(part) for part in parts] - shares * total)
    assert (off[:-1] <= 1 + 1e-6).all() and off[-1] <= len(shares)


@bounded
@given(labels=unbalanced_labels(), num_clients=st.integers(2, 20), stratified=st.booleans())
def test_iid_sizes_differ_by_at_most_one(labels: np.ndarray, num_clients: int, stratified: bool) -> None:
    made = Iid(stratified=stratified).split(labels, num_clients, stream(0))
    sizes = [len(own) for own in made.clients]
    assert max(sizes) - min(sizes) <= 1
    if stratified:
        counts = class_counts(labels, made)
        assert (counts.max(axis=0) - counts.min(axis=0) <= 1).all()
    renamed = np.random.default_rng(1).permutation(labels.max() + 1)[labels]
    assert sorted(sizes) == sorted(
        len(own) for own in Iid(stratified=stratified).split(renamed, num_clients, stream(0)).clients
    )


def distance_to_global(labels: np.ndarray, alpha: float) -> float:
    """Mean total variation distance between client label distributions and the global one, over ten seeds."""
    overall = np.bincount(labels) / len(labels)
    distances = []
    for seed in range(10):
        counts = class_counts(labels, Dirichlet(alpha=alpha, min_size=1).split(labels, 10, stream(seed)))
        distances.append(np.abs(counts / counts.sum(axis=1, keepdims=True) - overall).sum(axis=1).mean() / 2)
    return float(np.mean(distances))


def test_larger_alpha_brings_clients_closer_to_the_global_distribution() -> None:
    labels = balanced(10, 200)
    distances = [distance_to_global(labels, alpha) for alpha in (0.05, 0.5, 100)]
    assert distances[0] > distances[1] + 0.1 > distances[2] + 0.2


@pytest.mark.parametrize("variant", ["balanced", "plain"])
def test_enormous_alpha_gives_equal_sizes(variant: str) -> None:
    """Each of 10 classes is cut within 1 of 1/20 (the last client: 20), so N/K = 100 within 2C = 20."""
    partitioner = build(Dirichlet, {"alpha": 1e6, "variant": variant}, "partition")
    sizes = [len(own) for own in partitioner.split(balanced(10, 200), 20, stream(0)).clients]
    assert all(abs(size - 100) <= 20 for size in sizes)


@bounded
@given(labels=unbalanced_labels(), num_clients=st.integers(2, 10), seed=st.integers(0, 1000))
def test_balanced_stops_one_class_after_the_average(labels: np.ndarray, num_clients: int, seed: int) -> None:
    made = Dirichlet(alpha=0.1, min_size=1).split(labels, num_clients, stream(seed))
    assert max(map(len, made.clients)) <= len(labels) / num_clients + np.bincount(labels).max()


def test_plain_gives_each_client_the_same_share_on_average() -> None:
    """E[p_j] = 1/K = 0.25; var p_j = (1/4 · 3/4)/5 = 0.0375 at alpha 1; 400 seeds, 5 classes: standard error 0.0043."""
    labels = balanced(5, 40)
    sizes = [
        [len(own) for own in Dirichlet(alpha=1.0, variant="plain").split(labels, 4, stream(seed)).clients]
        for seed in range(400)
    ]
    # Floors move at most 1 of 40 samples from the first clients to the last: 0.025.
    assert np.abs(np.mean(sizes, axis=0) / 200 - 0.25).max() < 4 * 0.0043 + 0.025


def test_subsampled_limits_each_class_to_the_capacity_of_a_client() -> None:
    """N = 2,000, K = 20, ratio 0.5: capacity 50; each of 10 classes gives min(50, 0.5 · 200) = 50, hence 500 in all."""
    made = Dirichlet(alpha=1.0, variant="subsampled", ratio=0.5, min_size=1).split(balanced(10, 200), 20, stream(0))
    assert class_counts(balanced(10, 200), made).sum(axis=0).tolist() == [50] * 10
    assert not made.complete and made.notes == ("subsampled: 500 of 2000 samples used",)


def test_equalised_gives_equal_sizes_also_beyond_one_group() -> None:
    """25 clients form groups of 10, 10 and 5; 1,010 samples in 25 parts: ten of 41 and fifteen of 40."""
    made = Dirichlet(alpha=1.0, variant="equalised").split(balanced(10, 101), 25, stream(0))
    assert sorted(map(len, made.clients)) == [40] * 15 + [41] * 10


def test_unreachable_minimum_size_is_refused_with_what_to_change() -> None:
    with pytest.raises(DataError, match=r"alpha = 0\.01.*\n.*raise partition.alpha"):
        Dirichlet(alpha=0.01, variant="plain", min_size=40, max_tries=5).split(balanced(2, 100), 5, stream(0))
    with pytest.raises(DataError, match="the largest number possible is 5"):
        Dirichlet(min_size=40).split(balanced(2, 100), 6, stream(0))


def test_options_that_a_variant_would_ignore_are_configuration_errors() -> None:
    with pytest.raises(ConfigError, match="ratio"):
        build(Dirichlet, {"ratio": 0.5}, "partition")
    with pytest.raises(ConfigError, match="tasks = 2 needs variant: plain"):
        build(Dirichlet, {"tasks": 2, "variant": "equalised"}, "partition")


@bounded
@given(
    labels=unbalanced_labels(), num_clients=st.integers(2, 5), tasks=st.integers(2, 4), nested=st.booleans(), seed=seeds
)
def test_dirichlet_tasks_are_disjoint_and_complete_with_two_samples_or_more(
    labels: np.ndarray, num_clients: int, tasks: int, nested: bool, seed: int
) -> None:
    made = Dirichlet(variant="plain", tasks=tasks, nested=nested).split(labels, num_clients, stream(seed))
    assert made.tasks is not None and [len(own) for own in made.tasks] == [tasks] * num_clients
    flat = [task for own in made.tasks for task in own]
    assert min(map(len, flat)) >= 2
    assert np.array_equal(np.sort(np.concatenate(flat)), np.arange(len(labels)))


def test_nested_tasks_do_not_change_who_owns_what() -> None:
    """Drawn over clients first: owners are those of the plain variant without tasks, as long as nothing is retried."""
    labels = balanced(10, 200)
    nested = Dirichlet(alpha=1.0, variant="plain", tasks=3, nested=True).split(labels, 5, stream(3))
    plain = Dirichlet(alpha=1.0, variant="plain").split(labels, 5, stream(3))
    assert nested.retries == plain.retries == 0
    assert all(np.array_equal(a, b) for a, b in zip(nested.clients, plain.clients, strict=True))


def test_too_many_tasks_are_refused_with_the_number_of_clients_that_would_do() -> None:
    with pytest.raises(DataError, match="the largest number possible is 10"):  # 200 samples, 10 tasks of at least 2
        Dirichlet(variant="plain", tasks=10).split(balanced(2, 100), 11, stream(0))
    with pytest.raises(DataError, match="the smallest task never had more than"):
        Dirichlet(alpha=0.01, variant="plain", tasks=10, max_tries=3).split(balanced(2, 100), 5, stream(0))


@pytest.mark.parametrize("num_clients", [5, 10, 20, 50, 100])
def test_two_classes_per_client_and_equal_owners_per_class(num_clients: int) -> None:
    """2K/C owners per class: 1, 2, 4, 10, 20 for C = 10. At K = 100 a deal without repair is hardly ever valid."""
    labels = balanced(10, 100)
    for seed in range(5):
        counts = class_counts(labels, ClassesPerClient().split(labels, num_clients, stream(seed)))
        assert ((counts > 0).sum(axis=1) == 2).all()
        assert ((counts > 0).sum(axis=0) == 2 * num_clients // 10).all()
        held = np.where(counts > 0, counts, np.nan)
        assert (np.nanmax(held, axis=0) - np.nanmin(held, axis=0) <= 1).all()
        assert np.ptp(counts.sum(axis=1)) <= 2


@bounded
@given(
    num_classes=st.integers(2, 12), classes=st.integers(1, 12), factor=st.integers(1, 4), seed=st.integers(0, 10_000)
)
def test_any_number_of_classes_per_client(num_classes: int, classes: int, factor: int, seed: int) -> None:
    assume(classes <= num_classes)
    labels = balanced(num_classes, 60)
    num_clients = num_classes * factor
    counts = class_counts(labels, ClassesPerClient(classes=classes).split(labels, num_clients, stream(seed)))
    assert ((counts > 0).sum(axis=1) == classes).all()
    assert ((counts > 0).sum(axis=0) == classes * factor).all()


def test_nbench_gives_client_i_class_i() -> None:
    labels = balanced(10, 50)
    counts = class_counts(labels, ClassesPerClient(rule="nbench").split(labels, 10, stream(0)))
    assert ((counts > 0).sum(axis=1) == 2).all() and (np.diag(counts) > 0).all()


def test_classes_per_client_refusals() -> None:
    # 2K divisible by 10: K = 5 or 10; 7m divisible by 10: m = 10 alone.
    with pytest.raises(DataError, match=r"partition\.num_clients=5 or 10, partition\.classes=10, "):
        ClassesPerClient().split(balanced(10, 20), 7, stream(0))
    with pytest.raises(DataError, match="only 3 classes"):
        ClassesPerClient(classes=4).split(balanced(3, 20), 3, stream(0))
    rare = np.concatenate([np.zeros(50, dtype=np.int64), [1, 1]])
    with pytest.raises(DataError, match="class 1 has 2 training samples for 4 clients"):
        ClassesPerClient().split(rare, 4, stream(0))


def test_dominant_share_on_ten_clients_as_computed_in_the_specification() -> None:
    """Class size 5,000: 4,750 to the main client, 250/9 = 27.8 to each other, cut at floors: 4,993 to 5,002 in all."""
    labels = balanced(10, 5000)
    counts = class_counts(labels, Dominant().split(labels, 10, stream(0)))
    assert (np.diag(counts) == 4750).all()
    others = counts[~np.eye(10, dtype=bool)]
    assert others.min() == 27 and others.max() == 28
    assert counts[0].sum() == 4750 + 9 * 27 and counts.sum(axis=1).max() == 5002


@bounded
@given(num_classes=st.integers(2, 8), factor=st.integers(1, 3), seed=st.integers(0, 1000))
def test_dominant_share_is_within_a_point(num_classes: int, factor: int, seed: int) -> None:
    num_clients = num_classes * factor
    labels = balanced(num_classes, 400 * num_clients)
    counts = class_counts(labels, Dominant().split(labels, num_clients, stream(seed)))
    shares = counts / counts.sum(axis=1, keepdims=True)
    mains = shares[np.arange(num_clients), np.arange(num_clients) % num_classes]
    assert (counts > 0).all()
    if factor == 1:
        assert ((mains >= 0.94) & (mains <= 0.96)).all()
    # Over all main clients of a class it keeps 95 % of its samples, whatever the number of clients.
    for c in range(num_classes):
        assert abs(counts[c::num_classes, c].sum() / (400 * num_clients) - 0.95) < 0.01


def test_dominant_needs_a_multiple_of_the_classes() -> None:
    with pytest.raises(DataError, match="use 10 clients"):
        Dominant().split(balanced(10, 20), 12, stream(0))


@bounded
@given(
    labels=unbalanced_labels(),
    num_clients=st.integers(2, 10),
    shards=st.integers(1, 4),
    tasks=st.integers(2, 5),
    seed=st.integers(0, 1000),
)
def test_shards_make_equal_disjoint_tasks(
    labels: np.ndarray, num_clients: int, shards: int, tasks: int, seed: int
) -> None:
    made = Shards(shards=shards, tasks=tasks).split(labels, num_clients, stream(seed))
    assert made.tasks is not None
    flat = [task for own in made.tasks for task in own]
    assert len(flat) == num_clients * tasks
    assert max(map(len, flat)) - min(map(len, flat)) <= shards
    assert np.array_equal(np.sort(np.concatenate(flat)), np.arange(len(labels)))
    for own, its_tasks in zip(made.clients, made.tasks, strict=True):
        assert np.array_equal(own, np.sort(np.concatenate(its_tasks)))
    if np.bincount(labels).min() >= -(-len(labels) // (num_clients * tasks * shards)):
        assert max(len(np.unique(labels[task])) for task in flat) <= 2 * shards


def test_ways_and_shots_stay_in_the_published_ranges() -> None:
    """Ways 4 ± 2: 2..6. Shots 20 with spread 3: 18..23. Mean ways 4 with standard error sqrt(2/400) = 0.071."""
    labels = balanced(10, 2000)
    partitioner = WaysShots(ways=4, ways_spread=2, shots=20, shots_spread=3)
    counts = class_counts(labels, partitioner.split(labels, 400, stream(0)))
    ways = (counts > 0).sum(axis=1)
    assert ways.min() == 2 and ways.max() == 6
    assert abs(ways.mean() - 4) < 3 * 0.071
    for row in counts:
        held = row[row > 0]
        assert held.min() == held.max() and 18 <= held[0] <= 23


@pytest.mark.parametrize(
    ("kind", "shots"),
    [("fedproto", {18, 19, 20, 21, 22, 23}), ("fedproto_mnist", {18, 19, 20, 21}), ("fedproto_cifar100", {20})],
)
def test_shots_have_the_range_of_the_published_code(
    kind: Literal["fedproto", "fedproto_mnist", "fedproto_cifar100"], shots: set[int]
) -> None:
    """data.md, section 2.8, with s = 20 and a spread of 3: s-3+1 .. s+3; MNIST s-3+1 .. s+3-2; CIFAR-100 exactly s."""
    labels = balanced(10, 2000)
    made = WaysShots(ways=4, ways_spread=2, shots=20, shots_spread=3, kind=kind).split(labels, 400, stream(0))
    assert set(np.unique(class_counts(labels, made))) - {0} == shots


def test_the_published_range_of_mnist_may_be_empty() -> None:
    with pytest.raises(DataError, match="shots_spread = 1"):
        WaysShots(kind="fedproto_mnist", shots_spread=1).split(balanced(10, 2000), 4, stream(0))


def test_ways_shots_are_disjoint_while_the_classes_last_and_say_when_not() -> None:
    """20 clients x 3 ways x 10 shots = 600 of 10 x 100 samples; with 30 shots 1,800, more than there are."""
    labels = balanced(10, 100)
    enough = WaysShots(ways=3, ways_spread=0, shots=5, shots_spread=0).split(labels, 20, stream(0))
    assert not enough.overlap and len(np.unique(np.concatenate(enough.clients))) == 300
    scarce = WaysShots(ways=3, ways_spread=0, shots=30, shots_spread=0)
    made = scarce.split(labels, 20, stream(0))
    assert made.overlap and "several clients" in made.notes[0]
    assert all(len(own) == 90 for own in made.clients)
    with pytest.raises(DataError, match="strict=false"):
        WaysShots(ways=3, ways_spread=0, shots=30, shots_spread=0, strict=True).split(labels, 20, stream(0))
    with pytest.raises(DataError, match=r"lower partition\.shots"):
        WaysShots(shots=101, shots_spread=0).split(labels, 2, stream(0))


@bounded
@given(seed=st.integers(0, 1000), merge=st.integers(1, 3), num_clients=st.integers(1, 8))
def test_groups_are_never_divided(seed: int, merge: int, num_clients: int) -> None:
    rng = stream(seed)
    groups = 100 + rng.integers(0, 30, size=900)
    labels = rng.integers(0, 5, size=900)
    made = ByGroup(min_size=5, merge=merge).split(labels, num_clients, rng, groups)
    owners = [set(groups[own]) for own in made.clients]
    assert all(len(owner) == merge for owner in owners)
    assert len(set().union(*owners)) == num_clients * merge
    for own, members in zip(made.clients, owners, strict=True):
        assert len(own) == np.isin(groups, list(members)).sum() >= 5 * merge


def test_by_group_refusals() -> None:
    with pytest.raises(DataError, match="has no groups"):
        ByGroup().split(balanced(2, 20), 2, stream(0))
    with pytest.raises(DataError, match="the largest number possible is 2"):
        ByGroup(min_size=5, merge=2).split(balanced(2, 20), 3, stream(0), np.arange(40) % 5)
