"""Steps per second on a CUDA device: one client after the other, stacked, and stacked and compiled.

100 clients, all of them in every round, each 20 steps of 32 on images of 1x28x28 with `fedgen_cnn`; seconds are those
of the rounds after the first, without evaluation. `compiled` launches a step of fused kernels as one CUDA graph; `tf32`
and `bf16` are compiled too. The last case is the same work on one core of the CPU, by compiled steps.

With --peers also others on the GPU, each in an environment of its own: bare PyTorch whose step is a CUDA graph, and
bare JAX, on the same work; and pfl on its published CIFAR-10 setting (Granqvist et al., NeurIPS 2024), with ours
stacked and compiled: 1,000 clients of 50 random images of 3x32x32, 50 clients a round, one epoch of batches of 10, SGD
with 0.1, `pfl_cnn` of 1,626,442 parameters, 20 of the 1,500 rounds. Ours scores 10,000 test images after every tenth
round, pfl nothing there. pfl draws clients with replacement, we without. A peer that fails does not stop the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from cyclopts import Parameter

from benchmarks.command import report
from benchmarks.federation import Federation
from benchmarks.measuring import Bench, BenchOptions, Case, Measurement, Timing, option, paired
from benchmarks.peers.roster import Peers
from benchmarks.work import SHAPES, Work
from flcore.core.errors import ConfigError
from pipelines.cli.options import Common, File, Json, Names, Numbers

CASES = {
    "cuda, serial": ("device=cuda", "stack=false", "compile=none"),
    "cuda, stacked": ("device=cuda", "stack=true", "compile=none"),
    "cuda, compiled": ("device=cuda", "stack=true", "compile=default"),
    "cuda, compiled, tf32": ("device=cuda", "stack=true", "compile=default", "precision=tf32"),
    "cuda, compiled, bf16": ("device=cuda", "stack=true", "compile=default", "precision=bf16"),
    "cpu, compiled": ("device=cpu", "compile=default"),
}
SAME_WORK = ("torch_cuda_graph", "jax_cuda")
ALL_PEERS = (*SAME_WORK, "pfl_cuda")
CROSS_DEVICE = "cifar10-cross-device, cuda, compiled"
CROSS_DEVICE_WORK = Work(1000, 50, 50, 5, 10, 0.1, 20, cores=1, model="pfl_cnn")


@Parameter(name="*")
@dataclass(frozen=True)
class Options(BenchOptions):
    """Clients of a round, and peers."""

    clients: Numbers = option((100,), "clients of a round")
    peers: bool = option(False, "also others, in environments that are made in the cache folder")
    only_peers: Names | None = option(None, f"some of {', '.join(ALL_PEERS)}")
    peer_python: File | None = option(
        None, "an interpreter with the packages of the peers, where no registry is reached"
    )

    def __post_init__(self) -> None:
        for name in self.only_peers or ():
            if name not in ALL_PEERS:
                raise ConfigError(f"bench gpu: --only-peers {name}: expected some of {', '.join(ALL_PEERS)}")

    @property
    def named_peers(self) -> tuple[str, ...]:
        """Peers to measure."""
        return self.only_peers or (ALL_PEERS if self.peers else ())


def bench(*, options: Options = Options(), as_json: Json = False, common: Common = Common()) -> int:
    """Print the measurements of this benchmark."""
    return report("gpu", options, measure, as_json=as_json)


def measure(options: Options, bench: Bench) -> Measurement:
    """Train once per case and number of clients, and once per peer, in turn.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench gpu: no CUDA device on this machine; `protofl bench models` measures the CPU")
    peers = Peers(options.named_peers, bench, options.peer_python)
    cases: dict[str, Case] = {}
    pairs: dict[str, tuple[str, str]] = {}  # by name of a ratio, the two cases
    for clients in options.clients:
        work, suffix = Work(clients, cohort=clients, rounds=options.rounds, cores=1), f", {clients} clients"
        federation = Federation(bench, work)
        for kind, engine in CASES.items():
            engine = (*engine, f"stack_size={clients}") if "stack=true" in engine else engine
            cases[kind + suffix] = partial(_trained, federation, kind + suffix, engine)
            if kind != "cuda, serial":
                pairs[f"speed-up of {kind}{suffix}"] = f"cuda, serial{suffix}", kind + suffix
        for name in (name for name in SAME_WORK if name in peers.measured):
            title = name + suffix
            cases[title] = partial(peers.attempt, name, work, f"{title}, process", title)
            pairs[f"{name}{suffix}/cuda, compiled{suffix}"] = name + suffix, f"cuda, compiled{suffix}"
    if "pfl_cuda" in options.named_peers:
        work = CROSS_DEVICE_WORK
        federation = Federation(bench, work, "cifar10", SHAPES["pfl_cnn"], test_size=10_000, every=10)
        engine = (*CASES["cuda, compiled"], f"stack_size={work.cohort}")
        cases[CROSS_DEVICE] = partial(_trained, federation, CROSS_DEVICE, engine, evaluation=True)
        if "pfl_cuda" in peers.measured:
            cases["pfl_cuda"] = partial(peers.attempt, "pfl_cuda", work, "pfl_cuda, process", "pfl_cuda")
        pairs[f"pfl_cuda/{CROSS_DEVICE}"] = "pfl_cuda", CROSS_DEVICE
    series = bench.alternate(cases, options.repetitions)
    ratios = {
        name: paired(series, one, other)
        for name, (one, other) in pairs.items()
        if len(series.get(one, ())) == len(series.get(other, ())) > 0
    }
    settings = {"clients": list(options.clients), "samples_per_client": 640, "steps": 20, "batch_size": 32}
    settings |= {"model": "fedgen_cnn", "images": "1x28x28 uint8, random", "workers": 0, "peers": peers.settings()}
    return Measurement(settings, series, ratios)


def _trained(
    federation: Federation, case: str, engine: Sequence[str], *, evaluation: bool = False
) -> dict[str, Timing]:
    trained = federation.train(case, *(f"engine.{each}" for each in engine))
    return {case: trained.timing(federation.work.total_steps, evaluation=evaluation)}
