"""FedMLP: its loss, what each side keeps and sends, and its limit cases to the bit (fedmlp.md)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flcore.data.dividing import make_partition
from flcore.data.imbalance import Imbalance
from flcore.data.partition import Partition
from flcore.data.partitioners import PARTITIONERS
from flcore.engine.client import ClientRunner
from flcore.io.messages import Count, Prototypes, TensorDict
from flcore.io.records import Record
from flcore.methods.fedmlp import FedMLP, aggregate_local_prototypes, count_classes
from flcore.methods.kit.class_prototypes import nearest_prototype
from flcore.methods.types import Batch, Exchange, Metrics, Replies, RoundContext
from flcore.models.network import ModuleView
from tests.cases import quick

SMALL = {"name": "fedcspc_cnn", "projection_dim": 8}
SCHEDULES = ["cyclic", "blocked"]
OFF = {"weight_prototypes": 0, "weight_memory": 0, "alpha": 0}
SEVEN = torch.tensor([[1, 0], [0.9, 0.1], [0, 1], [0.1, 0.9], [0.2, 0.9], [-1, -1], [-1, -0.9]])


def everywhere(num_classes: int) -> torch.Tensor:
    return torch.ones(num_classes, dtype=torch.bool)


@pytest.fixture(scope="module")
def streams(lab: Any) -> Partition:
    """Four clients of three tasks of two shards each; classes of 40, 34, 30, 26, 22 and 20 samples (γ = 0.5)."""
    partitioner = PARTITIONERS["shards"](shards=2, tasks=3)
    return make_partition(lab.dataset, partitioner, num_clients=4, seed=1, imbalance=Imbalance(0.5))


@pytest.fixture(scope="module")
def stream(lab: Any, streams: Partition) -> Any:
    """Makes experiments on streams."""

    def make(schedule: str = "cyclic", rounds: int = 4, method: dict[str, Any] | None = None, **changes: Any) -> Any:
        settings = {"federation": {"rounds": rounds, "task_schedule": schedule}, "model": SMALL} | changes
        options = {"name": "fedmlp"} | (method or {})
        return lab.experiment(partition=streams, method=options, **settings)

    return make


def toy_view(lab: Any, encoder: bool = False) -> tuple[Any, ModuleView]:
    """A linear model over three pixels and three classes; its head starts at zero."""
    pixels = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    experiment = lab.linear(pixels, [0, 1, 2], [[0, 1, 2]], encoder=encoder, method__name="fedmlp")
    module = experiment.new_module()
    return module, ModuleView(module, experiment.setting.network, dict(module.named_parameters()))


def batch(*rows: tuple[float, ...], labels: list[int], weight: list[float] | None = None) -> Batch:
    images = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), 1, 1, -1)
    return Batch(images, torch.tensor(labels), None if weight is None else torch.tensor(weight))


def targets(*rows: tuple[float, ...], present: list[bool]) -> dict[str, torch.Tensor]:
    return {"means": torch.tensor(rows, dtype=torch.float32), "present": torch.tensor(present)}


def full_context() -> dict[str, Any]:
    """Targets of class 0 for z = (1, 0, -1).

    z - g = (0.2, -1.5, 2), z - p = (1, 1, 1), c = 0; rows of other classes hold what must not be read.
    """
    junk, first = (torch.nan,) * 3, [True, False, False]
    client_state = targets((0, 0, 0), junk, junk, present=first)
    return {
        "prototypes": targets((0.8, 1.5, -3), junk, junk, present=first),
        "semantic": targets((0, -1, -2), junk, junk, present=first),
        "memory": client_state | {"centres": client_state["means"], "centres_present": client_state["present"]},
    }


def test_total(lab: Any) -> None:
    """Fact 7: 0.407606 (logits 2, 1, 0) + 0.84 + 0.266217 + 0.5·0.5 = 1.763823."""
    module, view = toy_view(lab)
    module.head.bias.data = torch.tensor([2.0, 1.0, 0.0])
    terms = FedMLP().loss(view, batch((1, 0, -1), labels=[0]), full_context())
    expected = {"cross_entropy": 0.407606, "prototypes": 0.84, "memory": 0.266217, "semantic": 0.25}
    assert {name: term.item() for name, term in terms.items()} == pytest.approx(expected, abs=1e-6)
    assert sum(term.item() for term in terms.values()) == pytest.approx(1.763823, abs=1e-6)


def test_weights_reduction_and_direction(lab: Any) -> None:
    """w_P = 10: 8.4; with the sum over d = 3: L_P 25.2 and α·L_S 0.75; w_I = 3 with KL(c ‖ z): 3·0.308994 (fact 3)."""
    _, view = toy_view(lab)
    method = FedMLP(weight_prototypes=10, weight_memory=3, kl_dir="cz", proto_reduction="sum")
    terms = method.loss(view, batch((1, 0, -1), labels=[0]), full_context())
    found = [terms[name].item() for name in ("prototypes", "memory", "semantic")]
    assert found == pytest.approx([25.2, 3 * 0.308994, 0.75], abs=1e-5)
    # KL of z/2 to c/2 = 0 is that of (0.5, 0, -0.5): softmax e^0.5, 1, e^-0.5 over 3.255252.
    z = torch.tensor([0.5, 0, -0.5]).exp() / 3.255252
    warm = FedMLP(kl_temp=2).loss(view, batch((1, 0, -1), labels=[0]), full_context())["memory"]
    assert warm.item() == pytest.approx(float((z * (z * 3).log()).sum()), abs=1e-6)


def as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.nan_to_num(0).requires_grad_() if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("name", ["prototypes", "semantic", "memory"])
def test_terms_reach_the_features_only(lab: Any, name: str) -> None:
    """Fact 8: no gradient to the classifier, G, P or the memory; one to the encoder."""
    module, view = toy_view(lab, encoder=True)
    module.head.weight.data.fill_(0.3)
    inputs = full_context()
    inputs = {group: {key: as_leaf(value) for key, value in part.items()} for group, part in inputs.items()}
    constants = [tensor for part in inputs.values() for tensor in part.values() if tensor.requires_grad]
    parameters = dict(module.named_parameters())
    term = FedMLP().loss(view, batch((1, 0, -1), labels=[0]), inputs)[name]
    grads = torch.autograd.grad(term, [*parameters.values(), *constants], allow_unused=True)
    reached = {key for key, grad in zip(parameters, grads, strict=False) if grad is not None and grad.any()}
    assert reached == {"encoder.1.weight"}
    assert all(grad is None for grad in grads[len(parameters) :])


@pytest.mark.parametrize("ls_norm", ["samples", "classes"])
@pytest.mark.parametrize("weight", [None, [1.0, 0.0]], ids=["full", "padded"])
def test_no_minority_sample(lab: Any, ls_norm: Any, weight: list[float] | None) -> None:
    """Fact 12: exactly 0, and a gradient of exactly 0."""
    module, view = toy_view(lab, encoder=True)
    inputs = {"semantic": targets((9, 9, 9), (9, 9, 9), (9, 9, 9), present=[False, False, True])}
    given = batch((1, 0, -1), (3, 3, 3), labels=[0, 1], weight=weight)
    term = FedMLP(ls_norm=ls_norm).loss(view, given, inputs)["semantic"]
    assert term.item() == 0.0
    (grad,) = torch.autograd.grad(term, [module.encoder[1].weight])
    assert torch.equal(grad, torch.zeros(3, 3))


def test_norms_of_the_semantic_term(lab: Any) -> None:
    """Distances 1 in every dimension (0.5), 2 (1.5) of class 0, 0.2 (0.02) of class 1, 9 of class 2, no minority.

    Over samples (0.5 + 1.5 + 0.02)/3, over classes 1 + 0.02; padding, here of class 1, counts in neither. α = 1.
    """
    _, view = toy_view(lab)
    inputs = {"semantic": targets((0,) * 3, (0,) * 3, (0,) * 3, present=[True, True, False])}
    rows = ((1,) * 3, (2,) * 3, (0.2,) * 3, (9,) * 3)
    plain, padded = (
        batch(*rows, labels=[0, 0, 1, 2]),
        batch(*rows, (7,) * 3, labels=[0, 0, 1, 2, 1], weight=[1, 1, 1, 1, 0]),
    )
    for given in (plain, padded):
        samples, classes = (
            FedMLP(alpha=1, ls_norm=norm).loss(view, given, inputs)["semantic"] for norm in ("samples", "classes")
        )
        assert samples.item() == pytest.approx(2.02 / 3, abs=1e-6)
        assert classes.item() == pytest.approx(1.02, abs=1e-6)


def test_absent_classes_take_no_part(lab: Any) -> None:
    """Logits (2, 1, 7), class 2 absent: ln(1 + e^-1) = 0.313262; no gradient to its row.

    Padding whose label is absent stays finite.
    """
    module, view = toy_view(lab)
    module.head.bias.data = torch.tensor([2.0, 1.0, 7.0])
    given = batch((0, 0, 0), (0, 0, 0), labels=[0, 2], weight=[1, 0])
    term = FedMLP(mask_absent=True).loss(view, given, {"held": torch.tensor([True, True, False])})["cross_entropy"]
    assert term.item() == pytest.approx(0.313262, abs=1e-6)
    (grad,) = torch.autograd.grad(term, [module.head.bias])
    assert grad[2] == 0 and bool((grad[:2] != 0).all())


def exchange_of(lab: Any, num_classes: int, dim: int, number: int = 1) -> RoundContext:
    return RoundContext(replace(lab.experiment().setting, num_classes=num_classes, feature_dim=dim), number)


def test_global_prototypes(lab: Any) -> None:
    """Fact 2: (1, 2) and (3, 6) give (2, 4) whatever the sample counts; a class nobody uploads keeps (7, 7).

    Norms of the uploads: √5, √45, and (0, 3) of class 1: mean (2.236068 + 6.708204 + 3)/3 = 3.981424.
    """
    first = Prototypes(torch.tensor([[1.0, 2], [0, 3], [0, 0]]), torch.tensor([True, True, False]))
    second = Prototypes(torch.tensor([[3.0, 6], [0, 0], [0, 0]]), torch.tensor([True, False, False]))
    before = Prototypes(torch.tensor([[0.0, 0], [0, 0], [7, 7]]), torch.tensor([False, False, True]))
    server, ctx, none = Record({"prototypes": before}), exchange_of(lab, 3, 2, 2), Prototypes.empty(3, 2)
    replies = {0: {"prototypes": first, "num_samples": Count(1)}, 1: {"prototypes": second, "num_samples": Count(9)}}
    after, facts = aggregate_local_prototypes(server, Replies(replies), ctx)
    assert after["prototypes"].means.tolist() == [[2, 4], [0, 3], [7, 7]]
    expected = {"classes_known": 3, "prototype_norm_mean": 3.981424, "prototype_norm_max": 6.708204}
    assert facts == pytest.approx(expected, abs=1e-6)
    kept, facts = aggregate_local_prototypes(server, Replies({0: {"prototypes": none}, 1: {"prototypes": none}}), ctx)
    assert kept["prototypes"].means.tolist() == before.means.tolist()
    assert facts == {"classes_known": 1}


def clustered(
    lab: Any, means: torch.Tensor, present: torch.Tensor, counts: list[int], **options: Any
) -> tuple[Any, Metrics]:
    """What the server holds after the stage, and its facts."""
    server = {"prototypes": Prototypes(means, present), "class_counts": TensorDict({"classes": torch.tensor(counts)})}
    return FedMLP(**options).cluster_prototypes(Record(server), Replies({}), exchange_of(lab, *means.shape, 3))


def test_semantic_prototypes(lab: Any) -> None:
    """Fact 5's seven vectors, an eighth class without prototype: three centres; J = the ⌊8/2⌋ smallest: 4, 5, 6, 7.

    Class 7 has no prototype and cannot be drawn to a cluster.
    """
    means = torch.cat([SEVEN, torch.zeros(1, 2)])
    server, facts = clustered(lab, means, torch.tensor([True] * 7 + [False]), [9, 9, 9, 9, 1, 1, 1, 1])
    semantic, clusters = server["semantic"], server["clusters"]
    assert semantic.present.tolist() == [True] * 3 + [False] * 5
    assert torch.allclose(semantic.means[:3], torch.tensor([[0.95, 0.05], [0.1, 0.933333], [-1, -0.95]]), atol=1e-6)
    assert clusters["assignment"][:7].tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert clusters["minority"].tolist() == [False] * 4 + [True] * 3 + [False]
    assert facts == {"clusters": 3, "minority_classes": 4}


def test_a_single_cluster_is_none(lab: Any) -> None:
    """Directions (1, y), y = 0, 0.1, 0.2, 0.4, at 0, 5.71, 11.31 and 21.80 degrees: a chain, one component.

    After centring (section 5.4) they are (0, y - 0.175): the first two point down, the others up.
    """
    means = torch.tensor([[1.0, 0], [1, 0.1], [1, 0.2], [1, 0.4]])
    (chain, chained), (apart, parted) = (
        clustered(lab, means, everywhere(4), [4, 3, 2, 1], minority_fraction=1.0, cluster=cluster)
        for cluster in ("finch", "centred")
    )
    assert not chain["semantic"].present.any() and not chain["semantic"].means.any()
    assert not chain["clusters"]["minority"].any()
    assert chained == {"clusters": 1, "minority_classes": 4}
    assert apart["clusters"]["assignment"].tolist() == [0, 0, 1, 1]
    assert apart["clusters"]["minority"].all()
    assert parted == {"clusters": 2, "minority_classes": 4}


def test_other_clusterings(lab: Any) -> None:
    """K = 7: max(2, round(√7)) = 3 of k-means and average linkage; 2 when asked for; ``none``: p = own g."""
    for cluster in ("kmeans", "agglomerative"):
        found, _ = clustered(lab, SEVEN, everywhere(7), [1] * 7, cluster=cluster)
        assert found["clusters"]["assignment"].tolist() == [0, 0, 1, 1, 1, 2, 2], cluster
        fewer, _ = clustered(lab, SEVEN, everywhere(7), [1] * 7, cluster=cluster, num_clusters=2)
        assert fewer["clusters"]["assignment"].tolist() == [0] * 5 + [1] * 2, cluster
    own, _ = clustered(lab, SEVEN, everywhere(7), [1] * 7, cluster="none")
    assert torch.equal(own["semantic"].means[own["clusters"]["assignment"]], SEVEN)


def test_legs(lab: Any) -> None:
    """All clients report before the first round, and only where counts matter."""
    setting = lab.experiment().setting
    training = ("aggregate", "aggregate-prototypes", "cluster-prototypes")
    report, first = FedMLP().round_exchanges(1, setting)
    assert report == Exchange("report-counts", participants="all", phases=(), server_steps=("count-classes",))
    assert (first.participants, first.server_steps) == ("cohort", training)
    assert [exchange.server_steps for exchange in FedMLP().round_exchanges(2, setting)] == [training]
    assert [exchange.server_steps for exchange in FedMLP(counts="running").round_exchanges(1, setting)] == [
        ("count-classes", *training)
    ]
    assert [exchange.server_steps for exchange in FedMLP(use_semantic=False).round_exchanges(1, setting)] == [
        training[:2]
    ]


def test_bytes(lab: Any, stream: Any, streams: Partition, tmp_path: Any) -> None:
    """Section 3. K = 6, d = 8, T = 3; 8 bytes per id and count, 1 per bit of J.

    Set-up: 4·T·K counts up, nothing down. Each round up s + 1 and |K_{m,t}| rows; down s, G, and from the second round
    P, K ints and K bits. Without clustering v is the number of classes known.
    """
    experiment = stream(rounds=3, method={"cluster": "none"})
    model = experiment.setting.initial.num_parameters
    run = lab.run(experiment, tmp_path / "run")
    held = [(streams.task_counts[:, task] > 0).sum() for task in (0, 1)]
    first, second, _ = run.history
    assert first["bytes_down"] == {"model": 4 * 4 * model, "prototypes": 0}
    assert first["bytes_up"] == {
        "class_counts": 4 * 3 * 6 * 8,
        "model": 4 * 4 * model,
        "num_samples": 4 * 8,
        "prototypes": held[0] * (8 * 4 + 8),
    }
    known = int(first["server"]["classes_known"])
    clusters = int(first["server"]["clusters"])
    assert clusters == known > 1
    down = {name: second["bytes_down"][name] - first["bytes_down"].get(name, 0) for name in second["bytes_down"]}
    assert down == {
        "model": 4 * 4 * model,
        "prototypes": 4 * known * (8 * 4 + 8),
        "semantic": 4 * clusters * (8 * 4 + 8),
        "clusters": 4 * (6 * 8 + 6),
    }
    up = {name: second["bytes_up"][name] - first["bytes_up"][name] for name in second["bytes_up"]}
    assert up == {"class_counts": 0, "model": 4 * 4 * model, "num_samples": 4 * 8, "prototypes": held[1] * (8 * 4 + 8)}
    assert run.state.server["class_counts"]["classes"].tolist() == [40, 34, 30, 26, 22, 20]
    assert second["server"]["minority_classes"] == 3


@pytest.mark.parametrize(
    ("options", "down", "up"),
    [
        ({"use_prototypes": False}, {"model", "semantic", "clusters"}, {"model", "num_samples", "prototypes"}),
        ({"use_semantic": False}, {"model", "prototypes"}, {"model", "num_samples", "prototypes"}),
        ({"use_memory": False, "alpha": 0}, {"model", "prototypes"}, {"model", "num_samples", "prototypes"}),
        ({"weight_prototypes": 0, "use_semantic": False}, {"model"}, {"model", "num_samples", "prototypes"}),
        (OFF, {"model"}, {"model", "num_samples"}),
    ],
)
def test_what_no_term_needs_is_not_sent(
    lab: Any, stream: Any, options: dict[str, Any], down: set[str], up: set[str], tmp_path: Any
) -> None:
    experiment = stream(rounds=3, method=options)
    server = lab.run(experiment, tmp_path / "run").state.server
    reply, _ = lab.train(experiment, number=2, server=server)
    assert (set(reply.down), set(reply.up)) == (down, up)


def test_running_counts(lab: Any, stream: Any, tmp_path: Any) -> None:
    """A client tells the K counts of a task in its first round on it, never again: rounds 1 to 3 of cyclic."""
    run = lab.run(stream(rounds=4, method={"counts": "running"}), tmp_path / "cyclic")
    told = [record["bytes_up"]["class_counts"] for record in run.history]
    assert np.diff(told, prepend=0).tolist() == [4 * 6 * 8] * 3 + [0]
    assert run.state.server["class_counts"]["classes"].tolist() == [40, 34, 30, 26, 22, 20]
    # Blocked, tasks 0, 0, 1, 2: two rounds on a task tell once.
    blocked = lab.run(stream("blocked", rounds=4, method={"counts": "running"}), tmp_path / "blocked")
    assert blocked.history[-1]["bytes_up"]["class_counts"] == 3 * 4 * 6 * 8
    assert blocked.state.server["class_counts"]["classes"].tolist() == [40, 34, 30, 26, 22, 20]


def test_counts_add_up(lab: Any) -> None:
    """A report has a row per task; who tells nothing adds nothing; the server's own sum stays: (1, 0) + (2, 3)."""
    ctx = exchange_of(lab, 2, 1)
    replies = Replies({0: {"class_counts": TensorDict({"tasks": torch.tensor([[2, 0], [0, 3]])})}, 1: {}})
    server = Record({"class_counts": TensorDict({"classes": torch.tensor([1, 0])})})
    for held, total in ((Record(), [2, 3]), (server, [3, 3])):
        after, facts = count_classes(held, replies, ctx)
        assert after["class_counts"]["classes"].tolist() == total
        assert facts == {}
    assert server["class_counts"]["classes"].tolist() == [1, 0]


def test_what_leaves_is_released_and_what_stays_is_not(lab: Any) -> None:
    """(3, 4) twice of class 0, (0, 5) once of class 1; two samples needed, length at most 1: (0.6, 0.8) alone."""
    method = {"name": "fedmlp", "min_count": 2, "proto_clip": 1.0, "proto_unit": "client"}
    experiment = lab.linear([[3, 4], [3, 4], [0, 5]], [0, 0, 1], [[0, 1, 2]], method=method)
    reply, client_state = lab.train(experiment, exchange=1)
    sent, kept = reply.message["prototypes"], client_state["newest"]
    assert sent.present.tolist() == [True, False]
    assert sent.means.flatten().tolist() == pytest.approx([0.6, 0.8, 0, 0])
    assert kept.means.tolist() == [[3, 4], [0, 5]]


def overwritten(*uploads: Prototypes) -> Prototypes:
    """The last of several for each class."""
    means, present = torch.zeros(6, 8), torch.zeros(6, dtype=torch.bool)
    for upload in uploads:
        means = torch.where(upload.present.unsqueeze(1), upload.means, means)
        present = present | upload.present
    return Prototypes(means, present)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_when_it_is_committed(lab: Any, stream: Any, schedule: str, tmp_path: Any) -> None:
    """What a client recalls in rounds 2, 3, 4 and 6 (having missed 5) of 6, of its uploads of rounds 1 to 4.

    Cyclic, tasks 0, 1, 2, 0, 1, 2: each round is a stage, so all before it; where two have a class, the later. Blocked,
    tasks 0, 0, 1, 1, 2, 2: in round 2 nothing; in rounds 3 and 4 what it computed in round 2, nothing of round 3; in
    round 6 that and what it computed in round 4.
    """
    experiment = stream(schedule, 6)
    worker = ClientRunner(experiment)
    server = lab.run(experiment, tmp_path / "run").state.server
    uploads: list[Prototypes] = []
    client_state = Record()
    recalled = {}
    for number in (1, 2, 3, 4, 6):
        ctx = lab.receive(worker, number, Exchange(), 0, server, client_state)
        recalled[number] = experiment.method.loss_inputs(ctx).get("memory")
        if number < 6:
            exchange = 1 if number == 1 else 0
            reply, client_state = lab.train(
                experiment, number=number, exchange=exchange, server=server, client_state=client_state, worker=worker
            )
            uploads.append(reply.message["prototypes"])
    first, second, third, fourth = uploads
    assert recalled[1] is None
    if schedule == "cyclic":
        assert not torch.equal(first.means, fourth.means)
        expected = {2: (first,), 3: (first, second), 4: (first, second, third), 6: (first, second, third, fourth)}
    else:
        assert recalled[2] is None
        assert not torch.equal(first.means, second.means) and not torch.equal(third.means, fourth.means)
        expected = {3: (second,), 4: (second,), 6: (second, fourth)}
    for number, parts in expected.items():
        found, wanted = recalled[number], overwritten(*parts)
        assert torch.equal(found["means"], wanted.means)
        assert torch.equal(found["present"], wanted.present)
        assert 0 < int(found["centres_present"].sum()) <= int(wanted.present.sum())


def test_local_clusters_without_clustering(lab: Any, stream: Any, tmp_path: Any) -> None:
    """Each remembered prototype stands for itself; one alone is its own centre in any clustering."""
    experiment = stream(method={"cluster": "none"})
    run = lab.run(experiment, tmp_path / "run")
    ctx = lab.receive(ClientRunner(experiment), 4, Exchange(), 0, run.state.server, run.client_state(0))
    inputs = experiment.method.loss_inputs(ctx)["memory"]
    assert torch.equal(inputs["centres"][inputs["centres_present"]], inputs["means"][inputs["present"]])
    one = Prototypes(torch.full((6, 8), 2.0), torch.arange(6) == 3)
    client_state = {"earlier": Prototypes.empty(6, 8), "newest": one, "stretch": Count(0)}
    for cluster in ("finch", "centred", "kmeans", "agglomerative", "none"):
        alone = FedMLP(cluster=cluster).remembered(replace(ctx, client_state=Record(client_state)))
        assert alone["centres_present"].tolist() == [True] + [False] * 5
        assert torch.equal(alone["centres"][0], one.means[3])


def test_static_data_leave_nothing_to_remember(lab: Any, tmp_path: Any) -> None:
    """Fact 10: with T = 1 and α = 0, w_I has no effect where the stage never ends."""
    runs = [
        lab.run(
            lab.experiment(model=SMALL, method={"name": "fedmlp", "alpha": 0, "weight_memory": weight}),
            tmp_path / str(weight),
        )
        for weight in (0, 3)
    ]
    assert lab.same(runs[0].state.server["model"], runs[1].state.server["model"])
    assert [r["train_loss"] for r in runs[0].history] == [r["train_loss"] for r in runs[1].history]


@pytest.mark.parametrize("schedule", quick(SCHEDULES, 1))
@pytest.mark.parametrize(
    "options", quick([OFF, {"use_prototypes": False, "use_memory": False, "use_semantic": False}], 1)
)
def test_without_its_terms_it_is_fedavg(
    lab: Any, stream: Any, streams: Partition, schedule: str, options: Any, tmp_path: Any
) -> None:
    """Fact 10, with half of the clients per round; and the first round with all terms."""
    federation = {"rounds": 3, "task_schedule": schedule, "participation": 0.5}
    changes = {"federation": federation, "model": SMALL, "local__momentum": 0.9}
    plain = lab.run(lab.experiment(partition=streams, **changes), tmp_path / "fedavg")
    off = lab.run(stream(method=options, **changes), tmp_path / "off")
    assert lab.same(off.state.server, plain.state.server)
    assert off.history == plain.history
    on = lab.run(stream(**changes), tmp_path / "on")
    assert on.history[0]["train_loss"] == plain.history[0]["train_loss"]
    assert on.history[0]["class_accuracy"] == plain.history[0]["class_accuracy"]
    assert not lab.same(on.state.server["model"], plain.state.server["model"])


def test_nearest_prototype(lab: Any) -> None:
    """z = (0, 0, 0) from (3, 4, 0) and (0, 1, 0): distances 5 and 1; the class without prototype scores -(5 + 1)."""
    _, view = toy_view(lab)
    prototypes = Prototypes(torch.tensor([[3.0, 4, 0], [0, 1, 0], [0, 0, 0]]), torch.tensor([True, True, False]))
    images = torch.zeros(2, 1, 1, 3)
    assert nearest_prototype(view, images, Record({"prototypes": prototypes}), None).tolist() == [[-5, -1, -6]] * 2
    nothing = nearest_prototype(view, images, Record({"prototypes": Prototypes.empty(3, 3)}), None)
    assert torch.equal(nothing, view.classify(view.features(images)))


def test_heads_that_stay_at_home(lab: Any, stream: Any, tmp_path: Any) -> None:
    """``share: extractor``, one client per round: heads never travel, nor does anybody lose its own."""
    experiment = stream(
        method={"share": "extractor"}, federation={"rounds": 3, "task_schedule": "cyclic", "participation": 0.25}
    )
    run = lab.run(experiment, tmp_path / "run")
    start, method = experiment.setting.initial, experiment.method
    base = run.state.server["model"]
    assert set(start.params) - set(base.params) == {"head.weight", "head.bias"}
    assert run.history[0]["bytes_up"]["model"] == 4 * base.num_parameters
    assert run.history[0]["bytes_down"]["model"] == 4 * base.num_parameters
    ever = {client for record in run.history for client in record["participants"]}
    for client in range(4):
        own = lab.client_model(method, run.state.server, client, run.client_state(client), experiment.setting)
        assert list(own.params) == list(start.params)
        assert torch.equal(own.params["encoder.0.weight"], base.params["encoder.0.weight"])
        assert torch.equal(own.params["head.weight"], start.params["head.weight"]) == (client not in ever)
    client = run.history[-1]["participants"][0]
    ctx = lab.receive(ClientRunner(experiment), 3, Exchange(), client, run.state.server, run.client_state(client))
    began = method.initial_weights(ctx)
    assert torch.equal(began.params["head.weight"], run.client_state(client)["top"].params["head.weight"])
    assert torch.equal(began.params["encoder.0.weight"], base.params["encoder.0.weight"])
    assert set(method.predictors()) == {"averaged_heads"}
    assert set(FedMLP().predictors()) == {"nearest_prototype"}


def test_who_answers_with_what(lab: Any) -> None:
    """With own heads the nearest prototype answers for everybody, the head for a client; else the head for both."""
    module, view = toy_view(lab)
    module.head.bias.data = torch.tensor([0.0, 0.0, 5.0])
    server = Record({"prototypes": Prototypes(torch.eye(3), everywhere(3))})
    images = torch.tensor([[1.0, 0, 0]]).reshape(1, 1, 1, 3)
    part, whole = FedMLP(share="extractor"), FedMLP()

    def answers(method: FedMLP) -> list[int]:
        own = method.predict(view, images, server, everywhere(3))
        return [int(scores.argmax()) for scores in (method.predict(view, images, server, None), own)]

    assert answers(part) == [0, 2]
    assert answers(whole) == [2, 2]
    assert int(part.predictors()["averaged_heads"](view, images, server, None).argmax()) == 2
    assert int(whole.predictors()["nearest_prototype"](view, images, server, None).argmax()) == 0
