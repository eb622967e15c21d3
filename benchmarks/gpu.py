"""``gpu``: client steps per second on a CUDA device: one client after the other, stacked, and stacked and compiled.

100 clients, all of them in every round, each 20 steps of 32 on images of 1×28×28 with ``fedgen_cnn``; seconds are those
of the rounds after the first, without evaluation. ``compiled`` launches a step of fused kernels as one CUDA graph
(``engine.compile=default``); ``tf32`` and ``bf16`` are compiled too. Beside them the same work on one core of the CPU,
by compiled steps.

With ``--peers`` also what others make of a GPU, each in an environment of its own (`benchmarks/peers`): bare
PyTorch whose step is a CUDA graph, and bare JAX, on the same work; and pfl on its own published setting
(`cross_device.py`), beside ours, stacked and compiled, evaluation included. pfl evaluates nothing there. One that
cannot be had or fails stops nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks import cross_device
from benchmarks.common import (
    Bench,
    BenchOptions,
    Case,
    Federation,
    Measurement,
    Series,
    Timing,
    paired,
    synthetic_dataset,
)
from benchmarks.peers.process import Processes
from benchmarks.peers.roster import Roster
from benchmarks.work import Work
from flcore.core.errors import ConfigError

SAMPLES, STEPS, BATCH, LR = 640, 20, 32, 0.05

CASES = {
    "cuda, serial": ("device=cuda",),
    "cuda, stacked": ("device=cuda", "stack=true"),
    "cuda, compiled": ("device=cuda", "stack=true", "compile=default"),
    "cuda, compiled, tf32": ("device=cuda", "stack=true", "compile=default", "precision=tf32"),
    "cuda, compiled, bf16": ("device=cuda", "stack=true", "compile=default", "precision=bf16"),
    "cpu, compiled": ("device=cpu", "compile=default"),
}
SAME_WORK = ("torch_cuda_graph", "jax_cuda")
"""Peers that do the work of the cases; those of ``cifar10-cross-device`` are :data:`PUBLISHED`."""
PUBLISHED = ("pfl_cuda",)
CROSS_DEVICE = "cifar10-cross-device, cuda, compiled"
_CROSS_DEVICE_ROUNDS = 20


@dataclass(frozen=True)
class Options(BenchOptions):
    """``gpu``: how many clients are trained in a round, by what model, and whether others are measured beside us."""

    rounds: int = 6
    clients: tuple[int, ...] = (100,)
    model: str = "fedgen_cnn"
    peers: bool = False
    only_peers: tuple[str, ...] | None = None
    peer_python: Path | None = None

    def __post_init__(self) -> None:
        """Refuse peers that do other work."""
        super().__post_init__()
        for name in self.only_peers or ():
            if name not in (*SAME_WORK, *PUBLISHED):
                known = ", ".join((*SAME_WORK, *PUBLISHED))
                raise ConfigError(f"bench gpu: --only-peers {name}: expected some of {known}")

    @property
    def named_peers(self) -> list[str]:
        """Who is asked for; of other models than ``fedgen_cnn`` nobody does the same work."""
        names = self.only_peers or ((*SAME_WORK, *PUBLISHED) if self.peers else ())
        return [name for name in names if name in PUBLISHED or self.model == Work.model]


def measure(options: Options, bench: Bench) -> Measurement:
    """One training per case and number of clients, and one process per peer, in turn.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench gpu: no CUDA device on this machine; `protofl bench models` measures the CPU")
    given = None if options.peer_python is None else str(options.peer_python.absolute())
    roster = Roster(options.named_peers, bench.say, given)
    cases, speed_ups = _own_cases(options, bench)
    for clients in options.clients:
        work = Work(clients, SAMPLES, clients, STEPS, BATCH, LR, options.rounds, 1)
        cases |= _peers(SAME_WORK, roster, bench, work, f", {clients} clients")
    if any(name in PUBLISHED for name in options.named_peers):
        cases |= _cross_device(bench, roster)
    series = bench.alternate(cases, options.repetitions)
    settings = {
        **{"clients": list(options.clients), "samples_per_client": SAMPLES, "steps": STEPS, "batch_size": BATCH},
        **{"model": options.model, "images": "1x28x28 uint8, random", "workers": 0, "peers": roster.settings()},
    }
    ratios = {f"speed-up of {name}": paired(series, serial, name) for name, serial in speed_ups.items()}
    return Measurement(settings, series, ratios | _beside(series, roster, options))


def _own_cases(options: Options, bench: Bench) -> tuple[dict[str, Case], dict[str, str]]:
    """Ours, and by each but the serial one the serial one that it is set against."""
    cases: dict[str, Case] = {}
    speed_ups: dict[str, str] = {}
    for clients in options.clients:
        federation = _federation(clients, options, bench)
        serial = f"cuda, serial, {clients} clients"
        for kind, assignments in CASES.items():
            name = f"{kind}, {clients} clients"
            engine = [f"engine.{assignment}" for assignment in assignments]
            if "engine.stack=true" in engine:
                engine.append(f"engine.stack_size={clients}")
            steps = options.rounds * clients * STEPS
            cases[name] = partial(_trained, federation, name, engine, steps, evaluation=False)
            if name != serial:
                speed_ups[name] = serial
    return cases, speed_ups


def _cross_device(bench: Bench, roster: Roster) -> dict[str, Case]:
    """By us and by pfl, what pfl has published."""
    cohort, rounds = cross_device.COHORT, _CROSS_DEVICE_ROUNDS
    federation = cross_device.federation_of(bench, rounds)
    engine = [f"engine.{assignment}" for assignment in (*CASES["cuda, compiled"], f"stack_size={cohort}")]
    work = Work(
        clients=cross_device.CLIENTS,
        samples=cross_device.SAMPLES,
        cohort=cohort,
        steps=cross_device.STEPS,
        batch_size=cross_device.BATCH,
        lr=cross_device.LR,
        rounds=rounds,
        cores=1,
        model="pfl_cnn",
    )
    own = partial(_trained, federation, CROSS_DEVICE, engine, work.total_steps, evaluation=True)
    return {CROSS_DEVICE: own, **_peers(PUBLISHED, roster, bench, work, "")}


def _trained(
    federation: Federation, name: str, engine: list[str], steps: int, *, evaluation: bool
) -> Mapping[str, Timing]:
    trained = federation.train(name, *engine)
    return {name: Timing(trained.steady(evaluation=evaluation), steps, trained.execution.peak_mb)}


def _peers(names: tuple[str, ...], roster: Roster, bench: Bench, work: Work, of: str) -> dict[str, Case]:
    """A case for each of these that has an environment; ``of`` stands behind its name."""
    here = {name: python for name, python in roster.pythons.items() if name in names}
    processes = Processes(bench, work) if here else None

    def case(name: str, python: str) -> Mapping[str, Timing]:
        assert processes is not None
        title = f"{name}{of}"
        return processes.peer(name, python, title, cores=1).timings(work, f"{title}, process", title)

    return {f"{name}{of}": partial(roster.attempt, name, partial(case, name, python)) for name, python in here.items()}


def _beside(series: Series, roster: Roster, options: Options) -> dict[str, float]:
    """How many times as long as our compiled steps the peers take that were measured."""
    ratios = {}
    for name in roster.measured:
        pairs = {f"{name}, {clients} clients": f"cuda, compiled, {clients} clients" for clients in options.clients}
        for peer, own in ({name: CROSS_DEVICE} if name in PUBLISHED else pairs).items():
            ratios[f"{peer}/{own}"] = paired(series, peer, own)
    return ratios


def _federation(clients: int, options: Options, bench: Bench) -> Federation:
    params = {
        "data": {"name": "mnist"},
        "partition": {"name": "iid", "num_clients": clients},
        "model": {"name": options.model},
        "method": {"name": "fedavg"},
        "federation": {"rounds": options.rounds, "participation": 1.0},
        "local": {"steps": STEPS, "batch_size": BATCH, "lr": LR},
        "evaluation": {"every": options.rounds},
    }
    return Federation(bench, params, synthetic_dataset("mnist", (1, 28, 28), clients * SAMPLES, 1000))
