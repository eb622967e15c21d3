"""ProtoLDA: whitening and k-means by hand, what travels, and that no division of data matters (protolda.md)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from flcore.engine.client_data import ClientData
from flcore.engine.cohort import select_cohort
from flcore.evaluation.forward import Forward
from flcore.io.messages import TensorDict, Weights
from flcore.io.records import Record
from flcore.math.prototypes.dictionary import PatchMoments, whitening
from flcore.math.prototypes.discriminant import ClassSums, discriminant, discriminant_sums, reweighted
from flcore.math.prototypes.gaussians import from_upper_triangles
from flcore.methods.closed_head import CLASS_STATISTICS, EACH, LDA_HEAD, OWN, TOTALS
from flcore.methods.kit.patch_sums import ASSIGNED, DICTIONARY, FILTERS, PATCH_MOMENTS, WHITENING
from flcore.methods.protolda import ProtoLDA
from flcore.methods.types import MODEL, ClientContext, Replies, RoundContext
from tests.cases import quick

# Four images of 2x1 pixels: patches of one pixel are 2, 0 | 0, 4 | 0, 4 | 0, 4.
PIXELS, LABELS = [[2, 0], [0, 4], [0, 4], [0, 4]], [0, 1, 1, 1]
ONE_PIXEL = {"name": "patch_dictionary", "atoms": 1, "patch": 1, "grid": 1, "root": False, "threshold": 0.0}


def by_hand(lab: Any, clients: list[list[int]], **method: Any) -> Any:
    dataset = lab.toy_dataset(PIXELS, LABELS, None, None)
    partition = lab.by_hand(dataset, clients, [[0, 1]] * len(clients))
    settings = {"name": "protolda", "stride": 1, "wire": "float64", **method}
    return lab.experiment(dataset, partition, model=ONE_PIXEL, method=settings, federation={"rounds": 1})


def tiny(
    lab: Any, partition: Any = None, rounds: int = 1, federation: dict[str, Any] | None = None, **method: Any
) -> Any:
    """Six features' atoms on the bars of the tiny data; everything exact."""
    settings = {"name": "protolda", "wire": "float64", **method}
    asked = {"rounds": rounds, **(federation or {})}
    return lab.experiment(partition=partition, model=lab.model_of("protolda"), method=settings, federation=asked)


@pytest.fixture(scope="module")
def plain(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of one round."""
    return lab.run(tiny(lab), tmp_path_factory.mktemp("plain") / "run")


def sum_of(run: Any) -> ClassSums:
    totals = run.state.server[TOTALS]
    return ClassSums(totals["counts"], totals["sums"], from_upper_triangles(totals["second"]))


def head(run: Any) -> tuple[Any, Any]:
    """The head in float64, solved anew from the sums that a run ended with."""
    return discriminant(sum_of(run), 0.001)


def close(one: Any, other: Any, tolerance: float = 1e-9) -> None:
    for first, second in zip(head(one), head(other), strict=True):
        assert float((first - second).abs().max() / second.abs().max()) < tolerance


def test_the_first_legs_by_hand(lab: Any) -> None:
    """8 patches with sum 14 and squares 4 + 3·16 = 52: mean 1.75, variance 6.5 − 3.0625 = 3.4375; ε = 0.6: 5.5.

    The atom is ±1, the filter ±1/√5.5, the bias ∓1.75/√5.5. Patches above the mean (2, 4, 4, 4) have the atom's sign
    and those below (four of 0) the other one: sums ±14 of patches and 0 of signs, and the atom turns nowhere.
    """
    experiment = by_hand(lab, [[0], [1, 2, 3]], eps=0.6)
    server, method = Record(experiment.method.start_server(experiment.setting)), experiment.method
    sent = {client: lab.train(experiment, client, server=server)[0].message for client in (0, 1)}
    assert sent[0][PATCH_MOMENTS]["count"].tolist() == [2]
    assert [sent[k][PATCH_MOMENTS]["sum"].item() for k in (0, 1)] == [2, 12]
    assert [sent[k][PATCH_MOMENTS]["second"].item() for k in (0, 1)] == [4, 48]

    ctx = RoundContext(experiment.setting, 1, "patch-moments")
    server, facts = method.whiten(server, Replies(sent), ctx)
    atom = server[WHITENING]["atoms"].item()
    assert abs(atom) == 1
    filters = server[FILTERS].params
    assert filters["encoder.dictionary.weight"].item() == pytest.approx(atom / math.sqrt(5.5))
    assert filters["encoder.dictionary.bias"].item() == pytest.approx(-atom * 1.75 / math.sqrt(5.5))
    assert facts["whitened_share"] == pytest.approx(3.4375 / 5.5)

    sent = {client: lab.train(experiment, client, exchange=1, server=server)[0].message for client in (0, 1)}
    assert [sent[k][ASSIGNED]["sums"].item() * atom for k in (0, 1)] == [2, 12]
    assert [sent[k][ASSIGNED]["signs"].item() * atom for k in (0, 1)] == [0, 0]
    after, facts = method.fit_dictionary(server, Replies(sent), ctx)
    assert after[WHITENING]["atoms"].item() == atom
    assert facts == {"atoms_turned": 0, "empty_atoms": 0}


def test_patches_that_are_all_alike_are_left_as_they_are() -> None:
    """Their covariance is 0, and 0 + ε · 0 has no root to divide by. Likewise where noise has left less than 0."""
    alike = PatchMoments(3, torch.tensor([3.0, 6.0]).double(), 3 * torch.tensor([[1.0, 2.0], [2.0, 4.0]]).double())
    less = PatchMoments(3, alike.total, alike.second - torch.eye(2, dtype=torch.float64))
    for moments in (alike, less):
        mean, matrix, share = whitening(moments, 0.5)
        assert mean.tolist() == [1, 2] and share == 0
        torch.testing.assert_close(matrix, torch.eye(2, dtype=torch.float64))


def test_an_atom_without_patches_stays(lab: Any) -> None:
    """Atom 0 gets nothing; atom 1 two patches that are together (3, 4) beyond the mean, and becomes (0.6, 0.8)."""
    model = {**ONE_PIXEL, "atoms": 2}
    dataset = lab.toy_dataset(PIXELS, LABELS, None, None)
    experiment = lab.experiment(
        dataset, lab.by_hand(dataset, [[0], [1, 2, 3]], [[0, 1]] * 2), model=model, method={"name": "protolda"}
    )
    eye = torch.eye(2, dtype=torch.float64)
    whitening = {"mean": torch.tensor([1.0, 1.0], dtype=torch.float64), "matrix": eye, "atoms": eye.clone()}
    server = Record({WHITENING: TensorDict(whitening), FILTERS: Weights({})})
    sent = TensorDict({"sums": torch.tensor([[0.0, 0.0], [5.0, 6.0]]), "signs": torch.tensor([0.0, 2.0])})

    class Flat:
        """Filters of two values."""

        initial = Weights(dict(zip(DICTIONARY, (torch.zeros(2, 2, 1, 1), torch.zeros(2)), strict=True)))

    ctx = RoundContext(Flat(), 1, "dictionary-1")  # type: ignore[arg-type]
    after, facts = experiment.method.fit_dictionary(server, Replies({0: {ASSIGNED: sent}}), ctx)
    assert after[WHITENING]["atoms"].flatten().tolist() == pytest.approx([1, 0, 0.6, 0.8])
    assert facts == {"atoms_turned": pytest.approx((0 + 1 - 0.8) / 2), "empty_atoms": 1}


def test_the_head_is_that_of_all_features_at_once(lab: Any, plain: Any) -> None:
    """What the run ends with, from the features of all training samples under its own filters."""
    run = plain
    experiment = tiny(lab, lab.by_hand(lab.dataset, [range(240)], [range(60)]))
    client_state = Record({FILTERS: run.state.server[FILTERS]})
    known = lab.train(experiment, exchange=6, server=run.state.server, client_state=client_state)
    features = known[0].message[CLASS_STATISTICS]
    found = run.state.server[TOTALS]
    for name in ("counts", "sums", "second"):
        torch.testing.assert_close(found[name], features[name], rtol=1e-12, atol=1e-9)
    weight, bias = head(run)
    torch.testing.assert_close(run.state.server[MODEL].params["head.weight"], weight.float())
    torch.testing.assert_close(run.state.server[MODEL].params["head.bias"], bias.float())
    assert run.history[-1]["top1_global"] > 0.9  # bars of six columns are easy
    assert run.history[-1]["steps"] == 0


DIVISIONS = {
    "one client": [range(240)],
    "two halves, odd and even": [range(1, 240, 2), range(0, 240, 2)],
    "24 clients": [range(start, start + 10) for start in range(0, 240, 10)],
    "unequal": [range(3), range(3, 10), range(10, 77), range(77, 240)],
}


@pytest.mark.parametrize("division", quick(DIVISIONS, ["unequal"]))
def test_a_division_gives_the_same_model(lab: Any, plain: Any, division: str, tmp_path: Path) -> None:
    """The law: dictionary and head of the Dirichlet division, of any other, to 1e-9; and the same answers."""
    parts = DIVISIONS[division]
    order = torch.randperm(240, generator=torch.Generator().manual_seed(1)).tolist()
    clients = [[order[index] for index in part] for part in parts]
    other = lab.run(tiny(lab, lab.by_hand(lab.dataset, clients, [range(60)] * len(clients))), tmp_path / "other")
    close(other, plain)
    atoms = [run.state.server[WHITENING]["atoms"] for run in (plain, other)]
    assert float((atoms[0] - atoms[1]).abs().max()) < 1e-9
    assert other.history[-1]["top1_global"] == plain.history[-1]["top1_global"]


def test_everybody_answers_once_whoever_is_sampled(lab: Any, tmp_path: Path) -> None:
    """Half of the clients a round: nobody is counted twice, and nothing is sent by whom has answered already."""
    experiment = tiny(lab, rounds=8, federation={"participation": 0.5})
    run = lab.run(experiment, tmp_path / "run")
    answered = run.state.server[TOTALS]["answered"].tolist()
    sampled = [client for record in run.history for client in record["participants"]]
    assert len(sampled) == 8 * 2 and set(sampled) == {0, 1, 2, 3}
    assert sorted(client for client, _ in answered) == [0, 1, 2, 3]
    assert float(run.state.server[TOTALS]["counts"].sum()) == 240
    first = next(r["round"] for r in run.history if r["server"]["answers"] == 4)
    kinds = ("statistics", "task", "filters")
    counted = [{**record["bytes_up"], **record["bytes_down"]} for record in run.history]
    after = [{kind: costs[kind] for kind in kinds} for costs in counted[first - 1 :]]
    assert len(after) > 1 and all(costs == after[0] for costs in after)


@pytest.mark.parametrize("rounds", [1, 4])
def test_without_a_first_cohort_there_is_no_dictionary(lab: Any, rounds: int, tmp_path: Path) -> None:
    """Of seed 1 the one client of round 1 drops out: a run of one round stops too, before a head is delivered."""
    federation = {"rounds": rounds, "participation": 0.25, "dropout": 0.5}
    experiment = lab.experiment(seed=1, model=lab.model_of("protolda"), method__name="protolda", federation=federation)
    assert select_cohort(experiment, 1).trainers == ()
    cure = r"left no client in round 1, .* \(a cohort of 1\); lower dropout, or raise participation$"
    with pytest.raises(ConfigError, match=cure):
        lab.run(experiment, tmp_path / "run")


def test_who_fails_may_answer_later(lab: Any, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ProtoLDA.statistics
    failed: list[int] = []

    def failing(self: Any, ctx: Any, *rest: Any) -> Any:
        if ctx.client == 2 and not failed:
            failed.append(2)
            raise RuntimeError("by hand")
        return own(self, ctx, *rest)

    monkeypatch.setattr(ProtoLDA, "statistics", failing)
    run = lab.run(tiny(lab, rounds=2, federation={"on_client_error": "drop"}), tmp_path / "run")
    assert [record["server"]["answers"] for record in run.history] == [3, 4]
    close(run, plain)


def test_an_answer_that_is_there_already_is_refused(lab: Any, plain: Any) -> None:
    """A server that is sent the same statistics twice keeps its sums and says so."""
    experiment, run = tiny(lab), plain
    reply, _ = lab.train(
        experiment, 1, exchange=6, server=run.state.server, client_state=Record({FILTERS: run.state.server[FILTERS]})
    )
    ctx = RoundContext(experiment.setting, 2, "statistics")
    after, facts = experiment.method.solve_head(run.state.server, Replies({1: reply.message}), ctx)
    assert facts["repeated_answers"] == 1 and facts["answers"] == 4
    assert torch.equal(after[TOTALS]["second"], run.state.server[TOTALS]["second"])


def test_who_is_forgotten_was_never_there(lab: Any, plain: Any, tmp_path: Path) -> None:
    """The head of the others alone, over the same dictionary."""
    run = lab.run(tiny(lab, forget=[2]), tmp_path / "run")
    others = [client for client in range(4) if client != 2]
    assert [client for client, _ in run.state.server[TOTALS]["answered"].tolist()] == others
    experiment, total = tiny(lab), None
    client_state = Record({FILTERS: plain.state.server[FILTERS]})
    for client in others:
        reply, _ = lab.train(experiment, client, exchange=6, server=plain.state.server, client_state=client_state)
        sent = reply.message[CLASS_STATISTICS]
        sums = torch.zeros(6, sent["sums"].shape[1], dtype=torch.float64).index_copy_(0, sent["classes"], sent["sums"])
        counts = torch.zeros(6, dtype=torch.float64).index_copy_(0, sent["classes"], sent["counts"])
        own = ClassSums(counts, sums, from_upper_triangles(sent["second"]))
        total = own if total is None else total + own
    assert total is not None
    for found, expected in zip(head(run), discriminant(total, 0.001), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)
    with pytest.raises(ConfigError, match=r"method\.forget = 4: the last client is 3"):
        lab.run(tiny(lab, forget=[4]), tmp_path / "nobody")


def test_what_cannot_be_forgotten_exactly_is_refused_before_data_are_read(lab: Any) -> None:
    """Noise of the second answer is not that of the first; the second answer is of one task, the sums are of all."""
    method = {"name": "protolda", "forget": [2]}
    with pytest.raises(ConfigError, match=r"^method: forget = \[2\]: noisy sums .* set noise_multiplier = 0$"):
        Config.from_mapping({"method": {**method, "noise_multiplier": 1.0}})
    stream = {"method": method, "partition": {"name": "shards", "tasks": 2}}
    with pytest.raises(ConfigError, match=r"^federation\.task_schedule = cyclic: protolda with method\.forget = \[2\]"):
        Config.from_mapping(stream)
    Config.from_mapping({**stream, "federation": {"task_schedule": "none"}})
    Config.from_mapping({**stream, "method": {"name": "protolda"}})
    with pytest.raises(ConfigError, match=r"^federation\.task_schedule = cyclic: protolda_blocks asks every client"):
        Config.from_mapping({**stream, "method": {"name": "protolda_blocks"}})
    # What a file divides shows when it is read.
    tasks = [[range(60), range(60, 120)], [range(120, 180), range(180, 240)]]
    partition = lab.by_hand(lab.dataset, [range(120), range(120, 240)], [range(60)] * 2, tasks=tasks)
    with pytest.raises(ConfigError, match=r"one task's sums alone; set it to none, or forget=\[\]$"):
        tiny(lab, partition, rounds=2, forget=[1])._check()


@pytest.mark.parametrize(
    ("wire", "second", "rest"),
    quick(
        [
            ("int8", 300 + 8 * 24, 4),
            ("float64", 8 * 300, 8),
            ("float32", 4 * 276 + 4 * 24, 4),
            ("float16", 2 * 276 + 4 * 24, 4),
        ],
        2,
    ),
)
def test_bytes_of_one_run(lab: Any, wire: str, second: int, rest: int, tmp_path: Path) -> None:
    """K = 6 filters of d = 25, D = 24, C = 6, 4 clients: D(D + 1)/2 = 300, without the diagonal 276.

    Up, each: moments 8 + (25 + 325)·w; five times (150 + 6)·w; statistics with k classes 16k + 24k·w, and the second
    moment; a task. Down: six times filters of (150 + 6)·4, at the end a head of (6·24 + 6)·4.
    """
    run = lab.run(tiny(lab, wire=wire), tmp_path / "run")
    held = sum(int((counts > 0).sum()) for counts in torch.from_numpy(lab.partition.counts))
    up, down = run.history[-1]["bytes_up"], run.history[-1]["bytes_down"]
    assert up == {
        "patch_moments": 4 * (8 + 350 * rest),
        "assigned_patches": 4 * 5 * 156 * rest,
        "statistics": held * (16 + 24 * rest) + 4 * second,
        "task": 4 * 8,
    }
    assert down == {"filters": 4 * 6 * 156 * 4, "head": 4 * 150 * 4}


@pytest.mark.parametrize(
    "variant",
    quick([{"wire": "int8", "shrinkage": 0.01}, {"head": "ridge"}, {"shrinkage": None}, {"balance": True}, {"steps": 0},
           {"min_count": 3}, {"deliver": "every_round"}], 2),
)  # fmt: skip
def test_variants_answer_well(lab: Any, variant: dict[str, Any], tmp_path: Path) -> None:
    run = lab.run(tiny(lab, **variant), tmp_path / "run")
    assert run.history[-1]["top1_global"] > 0.85


def test_balanced_classes_that_come_later(lab: Any, tmp_path: Path) -> None:
    """Round 1 tells of 70 samples of classes 0 to 2: weights 70/(3·n_c); those of the second task count as they are."""
    labels = lab.dataset.train.labels
    of = [(labels == label).nonzero().flatten().tolist() for label in range(6)]
    tasks = [[of[0] + of[1][:20], of[3] + of[4]], [of[2][:10], of[5][:15]]]
    everybody = [[*own[0], *own[1]] for own in tasks]
    partition = lab.by_hand(lab.dataset, everybody, [range(60)] * 2, tasks=tasks)
    experiment = tiny(lab, partition, rounds=2, federation={"task_schedule": "cyclic"}, balance=True)
    run = lab.run(experiment, tmp_path / "run")
    expected = [70 / 3] * 3 + [len(of[3]), len(of[4]), 15]
    assert run.state.server[TOTALS]["counts"].tolist() == pytest.approx(expected)
    assert run.history[-1]["top1_global"] > 0.85


def three_to_one(lab: Any) -> Any:
    """Client 0 has 30 and 10 samples of classes 0 and 1, client 1 all others."""
    labels = lab.dataset.train.labels
    of = [(labels == label).nonzero().flatten().tolist() for label in range(6)]
    first = of[0][:30] + of[1][:10]
    rest = [index for index in range(240) if index not in first]
    return lab.by_hand(lab.dataset, [first, rest], [range(60)] * 2)


def test_own_shares(lab: Any, tmp_path: Path) -> None:
    """Client 0 has classes 0 and 1 three to one, of data with as many of all six: log ¾ + log 6 and log ¼ + log 6."""
    experiment = tiny(lab, three_to_one(lab), personal="shares")
    run = lab.run(experiment, tmp_path / "run")
    model = lab.client_model(experiment.method, run.state.server, 0, run.client_state(0), experiment.setting)
    shift = model.params["head.bias"] - run.state.server[MODEL].params["head.bias"]
    assert shift[:2].tolist() == pytest.approx([math.log(0.75 * 6), math.log(0.25 * 6)], abs=1e-4)
    assert (shift[2:] < -1000).all()
    assert run.client_state(0)[OWN]["counts"].tolist() == [30, 10, 0, 0, 0, 0]


def test_a_head_of_ones_own(lab: Any, tmp_path: Path) -> None:
    """Own sums with weight 2: the head of data in which each of the client's images stands three times.

    With the client's shares, 30 and 10 of 40, in it; and what is delivered to it is that head.
    """
    experiment = tiny(lab, three_to_one(lab), personal="mixture", own_weight=2.0)
    run = lab.run(experiment, tmp_path / "run")
    server = run.state.server
    weights = Weights({**experiment.setting.initial.params, **server[FILTERS].params})
    data = ClientData.of(experiment, [0, 1], 1)
    found = [(Forward(experiment).part(weights, own, "features"), own.labels) for own in data]
    rows, targets = (torch.cat([*[found[0][part]] * 3, found[1][part]]) for part in (0, 1))
    weight, bias = discriminant(discriminant_sums(rows, targets, 6), 0.001)
    counts = torch.bincount(targets, minlength=6).double()
    own = torch.tensor([30.0, 10.0, 0, 0, 0, 0], dtype=torch.float64)
    model = lab.client_model(experiment.method, server, 0, run.client_state(0), experiment.setting)
    torch.testing.assert_close(model.params["head.weight"], weight.float(), rtol=1e-4, atol=1e-4)
    expected = reweighted(bias, counts, own).float()
    torch.testing.assert_close(model.params["head.bias"], expected, rtol=1e-4, atol=1e-4)
    # Of the 60 images the first client can only get its two classes right, a third.
    assert run.history[-1]["mean_local"] < 2 / 3 + 1e-9 < 0.85 < run.history[-1]["top1_global"]
    delivered = experiment.method.broadcast(server, 0, RoundContext(experiment.setting, 1, "deliver-head"))
    assert torch.equal(delivered[LDA_HEAD].params["head.bias"], model.params["head.bias"])
    for wrong in ({"balance": True}, {"noise_multiplier": 1.0, "noise_of": "sum"}):
        with pytest.raises(ConfigError, match="personal = mixture"):
            tiny(lab, personal="mixture", **wrong)
    with pytest.raises(ConfigError, match="personal = shares"):
        tiny(lab, personal="shares", head="ridge")


def test_heads_of_ones_own_follow_who_is_forgotten(lab: Any, tmp_path: Path) -> None:
    """Without a client the others' heads are those of a run that it never was in; it has none of its own."""
    halves = [range(0, 80), range(80, 160), range(160, 240)]
    all_three = lab.by_hand(lab.dataset, halves, [range(60)] * 3)
    run = lab.run(tiny(lab, all_three, personal="mixture", forget=[2]), tmp_path / "run")
    each = run.state.server[EACH]
    assert each["clients"].tolist() == [0, 1]
    mixed = sum_of(run) + ClassSums(each["counts"][1], each["sums"][1], from_upper_triangles(each["second"][1]))
    weight, _ = discriminant(mixed, 0.001)
    torch.testing.assert_close(each["weight"][1], weight.float(), rtol=1e-5, atol=1e-5)


def test_noise_reaches_every_message_and_has_an_account(lab: Any) -> None:
    quiet, noisy = tiny(lab), tiny(lab, noise_multiplier=5.0)
    assert quiet.method.privacy(1) is None
    account = noisy.method.privacy(1)
    assert account["releases"] == 2 + 5 and account["unit"] == "sample"
    assert 0 < account["epsilon"] < 10
    server = {}
    for experiment in (quiet, noisy):
        state = Record(experiment.method.start_server(experiment.setting))
        sent = lab.train(experiment, 0, server=state)[0].message[PATCH_MOMENTS]
        server[experiment is noisy] = sent
    assert not torch.equal(server[True]["sum"], server[False]["sum"])
    assert not torch.equal(server[True]["second"], server[False]["second"])
    with pytest.raises(ConfigError, match="balance tells class counts without noise"):
        tiny(lab, noise_multiplier=1.0, balance=True)


def test_every_leg_has_noise_of_its_own(lab: Any) -> None:
    """Two steps of k-means whose filters are the same: the sums differ by their noise alone, and differ they must.

    The account composes the messages of a round as independent; equal noise would cancel in their difference.
    """
    experiment = tiny(lab, noise_multiplier=1.0)
    state = Record(experiment.method.start_server(experiment.setting))
    sent = lab.train(experiment, 0, server=state)[0].message
    ctx = RoundContext(experiment.setting, 1, "patch-moments")
    server, _ = experiment.method.whiten(state, Replies({0: sent}), ctx)
    first, second = (
        lab.train(experiment, 0, exchange=exchange, server=server)[0].message[ASSIGNED] for exchange in (1, 2)
    )
    assert (first["sums"] != second["sums"]).all() and (first["signs"] != second["signs"]).all()


def test_a_cohort_shares_the_noise_of_its_sum(lab: Any) -> None:
    """Of m clients each adds noise of deviation z/√m, so that the sum has z.

    The same draws scaled: what noise moves of a message is 1/√m of what it moves without secure aggregation.
    """
    noise = {"noise_multiplier": 5.0, "wire": "float64"}
    quiet, alone, shared = tiny(lab, wire="float64"), tiny(lab, **noise), tiny(lab, **noise, noise_of="sum")
    clients = shared.setting.cohort_size
    assert clients > 1 and "assumes" not in alone.method.privacy(1)
    assert "every client of a cohort answers" in shared.method.privacy(1)["assumes"]
    assert shared.method.privacy(1)["epsilon"] == alone.method.privacy(1)["epsilon"]
    state = Record(quiet.method.start_server(quiet.setting))
    sent = [lab.train(one, 0, server=state)[0].message[PATCH_MOMENTS] for one in (quiet, alone, shared)]
    for name in ("sum", "second"):
        without, most, least = (own[name] for own in sent)
        assert 0 < float((least - without).abs().max()) < float((most - without).abs().max())
    ctx = ClientContext(setting=shared.setting, round=1, exchange="statistics", client=0)
    whole, part = (one.method._noise(ctx, "second moment", (3,), 1.0) for one in (alone, shared))
    torch.testing.assert_close(part, whole / math.sqrt(clients))


def test_with_shared_noise_everybody_tells_of_every_class(lab: Any, tmp_path: Path) -> None:
    """Else a class that one client holds would have a share of its noise alone. Client 0 holds class 0, one image."""
    found = {}
    for name in ("message", "sum"):
        experiment = by_hand(lab, [[0], [1, 2, 3]], noise_multiplier=1.0, noise_of=name)
        server = lab.run(experiment, tmp_path / name).state.server.without(TOTALS)
        found[name] = lab.train(experiment, 0, exchange=1 + experiment.method.steps, server=server)[0].message[
            CLASS_STATISTICS
        ]
    assert found["message"]["classes"].tolist() == [0] and found["message"]["counts"].tolist() == [1]
    assert found["sum"]["classes"].tolist() == [0, 1] and found["sum"]["counts"].tolist() == [1, 0]
    assert found["sum"]["sums"][1].abs().min() > 0


def test_it_brings_its_model_where_none_is_named(lab: Any) -> None:
    assert Config.from_mapping({"method": {"name": "protolda"}}).model_spec.name == "patch_dictionary"
    config = Config.from_mapping({"method": {"name": "protolda"}, "model": {"atoms": 7}})
    assert config.to_mapping()["model"]["atoms"] == 7
    with pytest.raises(ConfigError, match=r"^model\.name = fedgen_cnn: protolda works with patch_dictionary alone$"):
        lab.config(method__name="protolda")


def test_who_has_too_little_of_every_class_tells_nothing(lab: Any, tmp_path: Path) -> None:
    """Client 0 has one sample; the others tell of all of theirs."""
    partition = lab.by_hand(lab.dataset, [[0], range(1, 120), range(120, 240)], [range(60)] * 3)
    run = lab.run(tiny(lab, partition, min_count=2), tmp_path / "run")
    assert [client for client, _ in run.state.server[TOTALS]["answered"].tolist()] == [1, 2]
    assert run.state.server[TOTALS]["counts"].sum() == 239
    nobody = lab.run(tiny(lab, partition, min_count=1000, personal="mixture"), tmp_path / "nobody")
    assert nobody.history[-1]["server"]["answers"] == 0 and EACH not in nobody.state.server


def test_sums_of_a_stream_forget_nothing(lab: Any, tmp_path: Path) -> None:
    """Two tasks per client in alternating rounds, met twice: in the end every sample stands in the sums once."""
    half = [[range(start, start + 60), range(start + 60, start + 120)] for start in (0, 120)]
    partition = lab.by_hand(lab.dataset, [range(120), range(120, 240)], [range(60)] * 2, tasks=half)
    experiment = tiny(lab, partition, rounds=4, federation={"task_schedule": "cyclic"})
    run = lab.run(experiment, tmp_path / "run")
    assert [record["server"]["answers"] for record in run.history] == [2, 4, 4, 4]
    assert sorted(run.state.server[TOTALS]["answered"].tolist()) == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert run.state.server[TOTALS]["counts"].sum() == 240
    # Nobody trains a model of its own: each one's is the global one.
    tasks = run.history[-1]["tasks"]
    assert tasks["a_loc"] == tasks["a_glo"] == run.history[-1]["top1_global"]
