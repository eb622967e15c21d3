"""Mini-batches laid out ahead: which samples, in which order, with which draws, and what is skipped."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flcore.config.sections import LocalConfig
from flcore.core import philox
from flcore.core.errors import ConfigError
from flcore.core.philox import philox_key
from flcore.data.images import normalise, scale_and_shift, scaled
from flcore.engine import client_data
from flcore.engine.client import ClientRunner
from flcore.engine.client_data import ClientData
from flcore.engine.local.plan import (
    BatchPlan,
    dropout_masks,
    passes,
    phase_layout,
    plan_batches,
    planned_steps,
)
from flcore.engine.local.samples import MadeSamples, drawn_labels
from flcore.engine.local.stacked_inputs import StackedBatches
from flcore.io.records import Record, serialise
from flcore.methods import METHODS
from flcore.methods.fedavg import FedAvg
from flcore.methods.types import ClientContext, Exchange, Phase
from tests.cases import quick


def positions(size: int, batch: int, epochs: int, steps: int | None, seed: int = 0, **local: Any) -> list[list[int]]:
    """Rows of client 1's mini-batches in round 1, or in ``round_number``."""
    number = local.pop("round_number", 1)
    config = LocalConfig(batch_size=batch, epochs=epochs, steps=steps, **local)
    layout = phase_layout(size, config, Phase(), number, skip_single=False)
    rows = layout.positions(philox_key(seed, "batches", 0), [1], 1)
    return [row[:length].tolist() for row, length in zip(rows[:, 0], layout.sizes, strict=True)]


def test_a_pass_takes_every_sample_once() -> None:
    """10 samples in batches of 4, two passes: 4, 4, 2, 4, 4, 2; shuffled anew."""
    batches = positions(10, 4, 2, None)
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    assert sorted(chain(*batches[:3])) == sorted(chain(*batches[3:])) == list(range(10))
    assert batches[:3] != batches[3:]
    assert positions(10, 4, 2, None) == batches != positions(10, 4, 2, None, seed=1)


def test_steps_chain_passes_and_are_cut() -> None:
    """Seven steps of the same passes: 4, 4, 2, 4, 4, 2, 4; epochs do not matter."""
    batches = positions(10, 4, 1, 7)
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2, 4]
    assert batches[:6] == positions(10, 4, 2, None)
    assert [len(batch) for batch in positions(3, 4, 5, 2)] == [3, 3]


def test_full_batches_leave_the_rest_of_a_pass_out() -> None:
    """10 samples in batches of 4: the two of each pass that are left over are others the next time."""
    batches = positions(10, 4, 2, None, batches="full")
    everything = positions(10, 4, 2, None)
    assert batches == [row for row in everything if len(row) == 4] and len(batches) == 4
    # Eight are twice 4, and nothing is left; three are fewer than a batch, and are what there is.
    for size, sizes in ((8, [4, 4]), (3, [3]), (0, [])):
        assert [len(row) for row in positions(size, 4, 1, None, batches="full")] == sizes


def test_an_endless_chain_of_passes_goes_on_with_the_rounds() -> None:
    """10 samples in batches of 4, two a pass; three steps a round: 0a 0b 1a | 1b 2a 2b | 3a 3b 4a."""

    def rows(number: int, steps: int) -> list[list[int]]:
        return positions(10, 4, 1, steps, batches="endless", round_number=number)

    chain_of_rounds = [row for number in (1, 2, 3) for row in rows(number, 3)]
    assert chain_of_rounds == rows(1, 9)
    assert all(len(row) == 4 for row in chain_of_rounds)
    for first in (0, 2, 4, 6):
        assert len({*chain_of_rounds[first], *chain_of_rounds[first + 1]}) == 8  # no sample twice in a pass
    assert positions(0, 4, 1, 3, batches="endless") == []


def test_endless_batches_need_a_number_of_steps(lab: Any) -> None:
    with pytest.raises(ConfigError, match=r"local\.batches = endless: set local\.steps"):
        lab.experiment(local__batches="endless")


def test_runs_of_all_kinds_count_their_steps(lab: Any) -> None:
    """Client 0 has 43 samples: 3 batches of 16 a pass, two of them full."""
    for changes, expected in (
        ({"local__epochs": 2}, 6),
        ({"local__steps": 5}, 5),
        ({"local__steps": 2}, 2),
        ({"local__epochs": 2, "local__batches": "full"}, 4),
        ({"local__steps": 5, "local__batches": "endless"}, 5),
    ):
        experiment = lab.experiment(**changes)
        assert lab.train(experiment)[0].steps == expected


def small(lab: Any, sizes: list[int], **changes: Any) -> Any:
    """Clients of so many samples each, of the tiny images."""
    ends = np.cumsum(sizes)
    clients = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return lab.experiment(partition=lab.by_hand(lab.dataset, clients, [range(60)] * len(sizes)), **changes)


def test_a_batch_of_one_is_skipped_where_there_is_batchnorm(lab: Any) -> None:
    """17 samples in batches of 16: the last batch has one sample."""
    assert lab.train(small(lab, [17]))[0].steps == 1
    assert lab.train(small(lab, [17], model={"name": "fedproto_cnn"}))[0].steps == 2
    assert lab.train(small(lab, [17], local={"batch_size": 16, "steps": 4}))[0].steps == 2


def test_a_batch_of_one_is_used_where_batchnorm_is_frozen(lab: Any) -> None:
    """Baselines.md section 0: skip where the model has BatchNorm *in training mode*."""
    assert lab.train(small(lab, [17], model={"name": "fedgen_cnn", "batchnorm": "frozen"}))[0].steps == 2


@pytest.mark.parametrize("stack", [False, True])
def test_batches_of_one_and_batchnorm_are_refused(lab: Any, stack: bool) -> None:
    refused = small(lab, [8, 8], local={"batch_size": 1}, engine__stack=stack)
    with pytest.raises(ConfigError, match=r"^local\.batch_size = 1: BatchNorm needs 2 samples or more"):
        ClientRunner(refused)
    frozen = {"name": "fedgen_cnn", "batchnorm": "frozen"}
    assert lab.train(small(lab, [8, 8], local={"batch_size": 1}, engine__stack=stack, model=frozen))[0].steps == 8
    assert lab.train(small(lab, [8, 8], local={"batch_size": 1}, model={"name": "fedproto_cnn"}))[0].steps == 8


@pytest.mark.parametrize(
    ("method", "model"),
    quick([("fedproto", None), *((method, None) for method in METHODS), ("fedproto", "fedproto_cnn")], 1),
)
def test_small_clients_and_single_classes_in_a_stack(lab: Any, method: str, model: str | None, tmp_path: Path) -> None:
    """One sample; fewer than a batch; one class only; a class nobody holds: no error and no NaN (section 23, 5)."""
    labels = lab.dataset.train.labels
    single = (labels == 2).nonzero().flatten().tolist()[:20]
    rest = [i for i in range(240) if int(labels[i]) in (0, 1)]
    partition = lab.by_hand(lab.dataset, [rest[:1], rest[1:6], single], [range(60)] * 3)
    chosen = {"name": model} if model else lab.model_of(method)
    changes = {"method__name": method, "model": chosen, "engine__stack": True}
    run = lab.run(lab.experiment(partition=partition, **changes), tmp_path / "run")
    text = (tmp_path / "run" / "history.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert len(run.history) == 3


# ---- lengths -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "local", "expected"),
    [
        (Phase(), {}, (1, None)),  # as configured: one pass
        (Phase(), {"epochs": 3}, (3, None)),
        (Phase(), {"epochs": 3, "steps": 7}, (3, 7)),  # steps go before epochs
        (Phase(epochs=2), {"steps": 7}, (2, None)),  # a phase's own length goes before the configured one
        (Phase(steps=5), {"epochs": 3}, (1, 5)),
        (Phase(epochs=2, steps=5), {}, (2, 5)),
    ],
)
def test_passes_of_a_phase(phase: Phase, local: dict[str, int], expected: tuple[int, int | None]) -> None:
    assert passes(LocalConfig(**local), phase) == expected


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 3), st.none() | st.integers(1, 9), st.booleans())
@settings(max_examples=60, deadline=None)
def test_planned_steps_are_those_laid_out(
    size: int, batch_size: int, epochs: int, steps: int | None, full: bool
) -> None:
    batches = "full" if full else "all"
    laid_out = positions(size, batch_size, epochs, steps, batches=batches)
    local = LocalConfig(batch_size=batch_size, epochs=epochs, steps=steps, batches=batches)
    assert len(laid_out) == planned_steps(size, local, Phase())


@pytest.mark.parametrize("stack", [False, True], ids=["serial", "stacked"])
def test_a_client_without_samples_trains_nothing(lab: Any, stack: bool) -> None:
    """It takes no step and its neighbours, of 5 and 10 samples, take one each with a loss of about ln 6 = 1.79."""
    partition = lab.by_hand(lab.dataset, [[], range(5), range(5, 15)], [range(60)] * 3)
    experiment = lab.experiment(partition=partition, engine__stack=stack, model={"name": "fedcspc_cnn"})
    replies = {client: found[0] for client, found in lab.train_stack(experiment, range(3)).items()}
    assert [replies[client].steps for client in range(3)] == [0, 1, 1]
    assert [replies[client].losses["cross_entropy"] for client in (1, 2)] == pytest.approx([1.79, 1.79], abs=0.3)


# ---- the tape ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawing(FedAvg):
    """A method with random numbers of its own: one per step, and one per step and class."""

    name = "drawing"

    def random_inputs(self, ctx: ClientContext, steps: int, generator: torch.Generator) -> Any:
        return {"mix": torch.rand(steps, generator=generator), "class": torch.rand(steps, 6, generator=generator)}


def turn_of(experiment: Any, client: int, number: int = 1) -> ClientContext:
    return ClientRunner(experiment).ctx(number, Exchange(), client, Record(), Record())


def plan_of(
    experiment: Any, clients: list[int], *, number: int = 1, phase: int = 0, skip_single: bool = False
) -> BatchPlan:
    sizes = [len(experiment.training_indices(client, number)) for client in clients]
    local = experiment.config.local
    layouts = [phase_layout(size, local, Phase(), number, skip_single=skip_single) for size in sizes]
    contexts = [turn_of(experiment, client, number) for client in clients]
    return plan_batches(experiment, experiment.new_module(), contexts, Phase(), phase, layouts)


def tape_of(experiment: Any, client: int = 0, **changes: Any) -> BatchPlan:
    return plan_of(experiment, [client], **changes)


def test_a_pass_of_endless_batches_begins_where_its_order_does(lab: Any) -> None:
    """20 samples in batches of 8, two full ones a pass; three steps a round: 0a 0b 1a | 1b 2a 2b | 3a 3b 4a.

    Mini-batches of one number within a round are of one pass: no sample stands in two of them.
    """
    dataset = lab.toy_dataset([[value] for value in range(20)], [0, 1] * 10, None, None)
    partition = lab.by_hand(dataset, [list(range(20))])
    changes: dict[str, Any] = {"local__batches": "endless", "local__steps": 3, "local__batch_size": 8}
    experiment = lab.experiment(dataset, partition, lab.ToySpec(), **changes)
    tapes = [tape_of(experiment, number=number) for number in (1, 2, 3)]
    assert [tape.pass_numbers.tolist() for tape in tapes] == [[[0, 0, 1]], [[0, 1, 1]], [[0, 0, 1]]]
    for tape in tapes:
        of_a_pass = [tape.positions[tape.pass_numbers[0] == which].flatten().tolist() for which in (0, 1)]
        assert all(len(set(rows)) == len(rows) for rows in of_a_pass)


RANDOM: dict[str, Any] = {"model": {"name": "fedproto_cnn"}, "data__augmentation": "crop_flip_rot"}


def test_the_parts_of_a_tape(lab: Any) -> None:
    """Client 0: 43 samples in batches of 16: 16, 16, 11; the last row is padded with zeros; draws for padding too."""
    tape = tape_of(lab.experiment(algorithm=Drawing(), **RANDOM))
    assert tape.sizes.tolist() == [[16, 16, 11]]
    assert tape.positions.shape == (3, 1, 16)
    drawn = chain(*(tape.positions[step, 0, :size].tolist() for step, size in enumerate(tape.sizes[0])))
    assert sorted(drawn) == [*range(43)]
    assert tape.positions[2, 0, 11:].tolist() == [0] * 5
    assert {site: tuple(noise.shape) for site, noise in tape.dropout_masks.items()} == {
        "channels": (3, 1, 16, 20),
        "features": (3, 1, 16, 50),
    }
    assert {name: tuple(draw.shape) for name, draw in tape.augmentation.items()} == {
        "shift": (3, 1, 16, 2),
        "flip": (3, 1, 16),
        "angle": (3, 1, 16),
    }
    assert {name: tuple(draw.shape) for name, draw in tape.draws.items()} == {"mix": (3, 1), "class": (3, 1, 6)}


def flat(tape: BatchPlan, place: int = 0) -> dict[str, list[float]]:
    """Every random number of a client's tape by kind, up to its last step."""
    kinds = {"positions": tape.positions, **tape.dropout_masks, **tape.augmentation, **tape.draws}
    steps = int((tape.sizes[place] > 0).sum())
    return {name: values[:steps, place].flatten().tolist() for name, values in kinds.items()}


@pytest.mark.parametrize("batches", ["all", "endless"])
def test_a_client_draws_the_same_alone_in_company_and_in_any_order(lab: Any, batches: str) -> None:
    """Clients of 17, 40, 40, 3 and 0 samples in batches of 16: two passes, or five steps; one draw at a time."""
    local = {"batch_size": 16, "batches": batches, **({"steps": 5} if batches == "endless" else {"epochs": 2})}
    experiment = small(lab, [17, 40, 40, 3, 0], local=local, algorithm=Drawing(), **RANDOM)
    for number, phase in ((1, 0), (3, 1)):
        alone = {client: flat(tape_of(experiment, client, number=number, phase=phase)) for client in range(5)}
        assert alone[1] != alone[2]
        for company in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [3, 1]):
            tape = plan_of(experiment, company, number=number, phase=phase)
            assert {client: flat(tape, place) for place, client in enumerate(company)} == {
                client: alone[client] for client in company
            }


def test_another_device_draws_the_same_masks(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic for other devices, done here: the numbers of the CPU's generator for every client and site."""
    experiment = small(lab, [17, 40, 3], model={"name": "fedproto_cnn"})
    here = plan_of(experiment, [1, 0, 2])
    monkeypatch.setattr(philox, "words", None)
    contexts = [turn_of(experiment, client) for client in (1, 0, 2)]
    steps = (here.sizes > 0).sum(1).tolist()
    object.__setattr__(experiment.config.engine, "device", "cpu:0")
    there = dropout_masks(experiment, experiment.new_module(), contexts, 0, steps)
    for site, masks in here.dropout_masks.items():
        for place, count in enumerate(steps):
            assert torch.equal(masks[:count, place], there[site][:count, place])


def test_a_tape_depends_on_seed_round_client_and_phase(lab: Any) -> None:
    """Every kind of draw differs as soon as one of the four does, and is the same where none does."""
    clients = lab.by_hand(lab.dataset, [range(40), range(40, 80)])
    changes = {"partition": clients, "algorithm": Drawing(), **RANDOM}
    experiment = lab.experiment(**changes)
    first = flat(tape_of(experiment))
    assert flat(tape_of(lab.experiment(**changes))) == first
    others = [
        tape_of(lab.experiment(seed=1, **changes)),
        tape_of(experiment, number=2),
        tape_of(experiment, client=1),
        tape_of(experiment, phase=1),
    ]
    for other in map(flat, others):
        for name, values in first.items():
            assert other[name] != values, name


def test_switching_one_kind_of_draw_on_shifts_no_other(lab: Any) -> None:
    plain = flat(tape_of(lab.experiment(model={"name": "fedproto_cnn"})))
    everything = flat(tape_of(lab.experiment(algorithm=Drawing(), **RANDOM)))
    assert plain.keys() < everything.keys()
    for name, values in plain.items():
        assert everything[name] == values, name


def test_single_batches_are_left_out_and_the_others_stay(lab: Any) -> None:
    """17 samples, two passes of 16 + 1: without the batches of one the two of 16 are the same rows."""
    experiment = small(lab, [17], local={"batch_size": 16, "epochs": 2})
    whole, skipping = tape_of(experiment), tape_of(experiment, skip_single=True)
    assert (whole.sizes.tolist(), skipping.sizes.tolist()) == ([[16, 1, 16, 1]], [[16, 16]])
    assert torch.equal(whole.positions[[0, 2]], skipping.positions)


def test_noise_is_uniform_and_positions_are_shuffled(lab: Any) -> None:
    """3·16·70 = 3,360 numbers: mean 0.5 ± 5·√(1/12/3360) = ± 0.025."""
    tape = tape_of(lab.experiment(model={"name": "fedproto_cnn"}))
    noise = torch.cat([values.flatten() for values in tape.dropout_masks.values()])
    assert (noise >= 0).all() and (noise < 1).all()
    assert abs(noise.mean().item() - 0.5) < 0.025
    assert tape.positions[0, 0].tolist() != sorted(tape.positions[0, 0].tolist())


def test_drawn_labels_by_hand() -> None:
    """Two clients' mini-batches of two, two steps: the padding, a 0, is not counted, nor a step that a client lacks."""
    labels = torch.tensor([[[0, 1], [2, 2]], [[2, 0], [0, 0]]])
    sizes = torch.tensor([[2, 2], [1, 0]])
    assert drawn_labels(labels, sizes, 4).tolist() == [[1, 1, 1, 0], [0, 0, 2, 0]]
    assert drawn_labels(labels[:0], sizes[:0], 3).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_stack_counts_what_each_of_its_clients_drew() -> None:
    """Labels 0 1 1 2 2: the first client has rows (0, 1), (2) of the first three, the second (1) of the last two."""
    rows = torch.tensor([[[0, 1], [1, 0]], [[2, 0], [0, 0]]])
    sizes, zeros = torch.tensor([[2, 1], [1, 0]]), torch.zeros(2, 2, dtype=torch.int64)
    tape = BatchPlan(rows, sizes, {}, {}, {}, torch.tensor([9, 9]), zeros, 1)
    samples = MadeSamples(torch.zeros(5, 2), torch.tensor([0, 1, 1, 2, 2]))
    batches = StackedBatches(tape, [0, 3], samples, "cpu")
    assert batches.drawn(4).tolist() == [[1, 2, 0, 0], [0, 0, 1, 0]]


def test_a_whole_pass_draws_every_sample_once(lab: Any) -> None:
    """What a method hears of it: with 2 passes twice the client's class counts, whichever engine trains."""

    @dataclass(frozen=True)
    class Hearing(FedAvg):
        def reply(self, ctx: ClientContext, trained: Any) -> Any:
            assert torch.equal(trained.drawn_labels(), 2 * ctx.class_counts)
            return super().reply(ctx, trained)

    for stack in (False, True):
        changes = {"model": {"name": "fedcspc_cnn"}, "local__epochs": 2, "engine__stack": stack}
        assert len(lab.train_stack(lab.experiment(algorithm=Hearing(), **changes), range(4))) == 4


def test_when_images_are_normalised_changes_no_bit(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client too large to be normalised whole is normalised batch by batch: element-wise, hence the same."""
    at_once = lab.run(lab.experiment(), tmp_path / "at-once")
    monkeypatch.setattr(client_data, "CACHE_BYTES", 0)
    by_batch = lab.run(lab.experiment(), tmp_path / "by-batch")
    assert serialise(at_once.state.server) == serialise(by_batch.state.server)


def test_a_program_may_normalise_images_itself(lab: Any) -> None:
    """It is given bytes as they are stored, a scale 1/(255 s) and a shift -m/s by channel, and comes to the same bits.

    With a mean of 1/2 and a deviation of 1/4: 0 is -2, 255 is 2, 51 is (0.2 - 0.5) / 0.25 = -1.2.
    """
    scale, shift = scale_and_shift([0.5], [0.25], "cpu")
    found = scaled(torch.tensor([[[[0, 255, 51]]]], dtype=torch.uint8), scale, shift)
    assert found.shape == (1, 1, 1, 3) and found.flatten().tolist() == pytest.approx([-2, 2, -1.2])
    experiment = lab.experiment()
    (data,) = ClientData.of(experiment, [2], 1)
    rows, meta = torch.tensor([5, 0, 5]), experiment.dataset.meta
    bytes_of_them = data.gathered.raw_images(rows + data.offset)
    assert bytes_of_them.dtype == torch.uint8 and len(bytes_of_them.unique()) > 2
    assert torch.equal(scaled(bytes_of_them, *scale_and_shift(meta.mean, meta.std, "cpu")), data.images(rows))


def test_images_are_normalised_when_they_are_asked_for(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, n of n; the next one has all n held, and from then on none is normalised again: 2 n at most."""
    (data,) = ClientData.of(lab.experiment(), [0], 1)
    (whole,) = ClientData.of(lab.experiment(), [0], 1)
    expected, number = whole.block(0, len(whole)), len(whole)
    normalised: list[int] = []

    def counting(images: Tensor, *statistics: Any) -> Tensor:
        normalised.append(len(images))
        return normalise(images, *statistics)

    monkeypatch.setattr(client_data, "normalise", counting)
    for position in range(number):
        assert torch.equal(data.images(torch.tensor([position])), expected[position : position + 1])
    assert sum(normalised) == number
    for _ in range(2):
        assert torch.equal(data.images(torch.tensor([0, number - 1])), expected[[0, number - 1]])
        assert sum(normalised) == 2 * number
