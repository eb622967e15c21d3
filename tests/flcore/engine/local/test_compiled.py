"""Programs: made once, found again, refused with a reason; and compiled training beside every other way to train."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import SemLock
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from tqdm.std import TqdmDefaultWriteLock, tqdm

from flcore.core.errors import RunError
from flcore.core.optim import Sgd
from flcore.engine.client import ClientRunner
from flcore.engine.local import compiled, compiler
from flcore.engine.local.compiled import CompiledTrainer
from flcore.engine.local.compiler import Compiler
from flcore.engine.local.convolution import use_im2col
from flcore.engine.local.program import NotCompilableError
from flcore.engine.local.step import qualified_name
from flcore.engine.run_state import RunState
from flcore.experiment.run_folder import RunFiles
from flcore.io.records import Record
from flcore.methods import METHODS
from flcore.methods.fedavg import FedAvg
from flcore.methods.fedprox import FedProx
from flcore.methods.types import LossInputs, Phase, StepSpec

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler (g++) on this machine")


@pytest.mark.slow
@needs_compiler
def test_a_program_is_compiled_once_and_does_what_the_function_does(
    steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[2, 2, 2, 2] halved is ones, its sum was 8; [0, 1, 2] has 2 at most, and doubled is [0, 2, 4].

    To compile makes nothing that outlives a process which is ended from outside. What comes to the same graph, such as
    a step of other code or with a value that it does not read, is traced, and shares the library.
    """
    made: list[object] = []
    for holder, name in ((tqdm, "_lock"), (TqdmDefaultWriteLock, "mp_lock")):  # those of an earlier test
        monkeypatch.delattr(holder, name, raising=False)
    monkeypatch.setattr(SemLock, "__init__", lambda lock, *arguments, **options: made.append(lock))
    Compiler(tmp_path).make(steps.halving, steps.example, 1, {"code": 1})
    assert made == []
    assert steps.example[0].tolist() == [1, 1, 1, 1]  # what it was shown is not touched
    known = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert known["terms"] == ["sum", "most"]
    found = Compiler(tmp_path).make(steps.asking, steps.example, 1, {"code": 1})  # by its name: not made again
    values = torch.full((4,), 2.0)
    total, most, recorded = found.run([values], [torch.arange(3.0)])
    found.finish()
    assert (total.item(), most.item(), recorded.tolist(), values.tolist()) == (8, 2, [0, 2, 4], [1, 1, 1, 1])

    monkeypatch.setattr(compiler, "_machine_code", None)
    shared = Compiler(tmp_path).make(steps.halving, steps.example, 1, {"code": 2})
    assert tuple(shared.terms) == ("sum", "most")
    assert shared.run([values], [torch.arange(3.0)])[0].item() == 4
    assert values.tolist() == [0.5] * 4
    assert (len(list(tmp_path.glob("*.json"))), len(list(tmp_path.glob("*.so")))) == (2, 1)


def test_another_program_has_another_name(steps: Any, tmp_path: Path) -> None:
    compiler = Compiler(tmp_path)
    paths = {
        compiler.path(example, facts)
        for example in (
            steps.example,
            [torch.ones(5), steps.example[1]],
            [torch.ones(4, dtype=torch.float64), steps.example[1]],
        )
        for facts in ({"code": 1}, {"code": 2})
    }
    assert len(paths) == 6
    assert compiler.path([torch.zeros(4), torch.zeros(3)], {"code": 1}) in paths  # shapes, not values
    assert not list(tmp_path.iterdir())


def test_what_asks_for_values_is_refused_and_remembered(
    steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with pytest.raises(NotCompilableError) as refused:
            Compiler(tmp_path).make(steps.asking, steps.example, 0, {})
        assert len(str(refused.value).splitlines()) == 1
        monkeypatch.setattr(compiler, "traced", None)  # not again
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".json", ".lock"]


@pytest.mark.slow
def test_a_compiler_that_fails_says_so_and_leaves_nothing(
    steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "failing++"
    compiler.write_text("#!/bin/sh\necho 'internal compiler error' >&2\nexit 1\n")
    compiler.chmod(0o755)
    from torch._inductor import config

    with monkeypatch.context() as patch, config.patch({"cpp.cxx": (str(compiler),)}):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
        with pytest.raises(RunError, match=r"^engine\.compile: the compiler failed \(.*use engine\.compile=none"):
            Compiler(tmp_path / "steps").make(steps.halving, steps.example, 1, {})
    assert not list((tmp_path / "steps").glob("*.json"))


def test_a_library_that_cannot_be_loaded_is_named(steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder from which nothing may be run."""
    library = tmp_path / "library"
    library.write_bytes(b"no machine code")
    monkeypatch.setattr(compiler, "_machine_code", lambda *_: library)
    with pytest.raises(RunError, match=r"^\S+\.so: cannot be loaded \(.*\); delete it, or .* in XDG_CACHE_HOME$"):
        Compiler(tmp_path / "steps").make(steps.halving, steps.example, 1, {})


@needs_compiler
@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("echo no headers >&2; exit 1", r"fails \(no headers\); mend that"),
        ("exit 3", r"fails \(exit code 3\); mend that"),
        ("exit 0", r"fails \(.*No such file.*\); mend that"),
        ('exec g++ -static-libstdc++ "$@"', r"puts a C\+\+ library of its own into what it makes, .* set\?\)"),
    ],
)
def test_a_compiler_is_tried_before_a_step_is_compiled(
    does: str, said: str, steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is here is fine; PyTorch's loader dies of what the last of these makes, if the versions differ."""
    if said.startswith("puts") and sys.platform != "linux":
        pytest.skip("how libraries name what they need is Linux's")
    compiler.check_compiler(compiler.compiler_name())
    other = tmp_path / "other++"
    other.write_text(f"#!/bin/sh\n{does}\n")
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    monkeypatch.setattr("torch._inductor.aot_compile", None)
    with pytest.raises(RunError, match=rf"^engine\.compile: \S+other\+\+ {said}.* CXX, or use engine\.compile=none$"):
        Compiler(tmp_path / "steps").make(steps.halving, steps.example, 1, {})
    assert not list((tmp_path / "steps").glob("*.so")) and not list((tmp_path / "steps").glob("*.json"))


def test_the_oldest_programs_go(steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three descriptions of two graphs: the first description goes, and not the library that the third one shares."""
    monkeypatch.setattr(compiler, "MAX_PROGRAMS", 2)
    library, folder = tmp_path / "library", tmp_path / "steps"
    library.write_bytes(b"code")
    monkeypatch.setattr(compiler, "_machine_code", lambda *_: library)
    monkeypatch.setattr(compiler, "_loaded", lambda path: path)
    step_compiler = Compiler(folder)
    paths = [step_compiler.path(steps.example, {"code": code}) for code in range(4)]

    def made(code: int, step: Any) -> Any:
        program = step_compiler.make(step, steps.example, 1, {"code": code})
        for path in (paths[code], program.runner):
            os.utime(path, (code, code))
        return program.runner

    halving, doubling = made(0, steps.halving), made(1, steps.doubling)
    assert made(2, steps.halving) == halving != doubling
    assert [path.exists() for path in (*paths, halving, doubling)] == [False, True, True, False, True, True]
    tripling = made(3, steps.tripling)
    assert [path.exists() for path in paths] == [False, False, True, True]
    assert [path.exists() for path in (halving, doubling, tripling)] == [True, False, True]
    assert {path.name for path in folder.iterdir()} == {
        name for path in (*paths[2:], halving, tripling) for name in (path.name, f"{path.name}.lock")
    }


def test_a_library_that_is_gone_is_made_again(steps: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, folder = tmp_path / "library", tmp_path / "steps"
    library.write_bytes(b"code")
    monkeypatch.setattr(compiler, "_machine_code", lambda *_: library)
    monkeypatch.setattr(compiler, "_loaded", lambda path: path)
    first = Compiler(folder).make(steps.halving, steps.example, 1, {}).runner
    first.unlink()
    assert Compiler(folder).make(steps.halving, steps.example, 1, {}).runner == first
    assert first.exists()


@pytest.mark.slow
@needs_compiler
def test_a_step_of_convolutions_of_every_kind_is_compiled(tmp_path: Path) -> None:
    """Padded, strided, and one weight a pixel with a stride, as in a residual shortcut: loss and weights agree."""
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2), nn.Conv2d(4, 8, 1, stride=2)]
    module = use_im2col(nn.Sequential(*layers))
    names = [name for name, _ in module.named_parameters()]

    def step(tensors: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        *params, images = tensors
        leaves = [param.detach().requires_grad_() for param in params]
        found = torch.func.functional_call(module, dict(zip(names, leaves, strict=True)), (images,))
        loss = found.square().sum()
        grads = torch.autograd.grad(loss, leaves)
        with torch.no_grad():
            for param, grad in zip(params, grads, strict=True):
                param.sub_(0.01 * grad)
        return {"loss": loss.detach()}, []

    one = [param.detach().clone() for param in module.parameters()]
    two = [param.clone() for param in one]
    images = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    expected, _ = step([*one, images])
    (found,) = Compiler(tmp_path).make(step, [*two, images], len(two), {}).run(two, [images])
    assert found.item() == pytest.approx(expected["loss"].item(), rel=1e-5)
    for mine, other in zip(one, two, strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


# ---- training ----------------------------------------------------------------------------------------------------


class Unnamed:
    """An object that has no name of its own."""


@dataclass(frozen=True)
class Odd(FedAvg):
    name = "odd"

    def loss_inputs(self, ctx: Any) -> LossInputs:
        return {"odd": Unnamed()}


def test_a_context_that_has_no_name_is_trained_as_without(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same bytes as the serial trainer's, and one line that says why, however many turns there are."""
    monkeypatch.setattr(compiled, "default_folder", lambda: tmp_path / "steps")
    serial = lab.run(lab.experiment(algorithm=Odd()), tmp_path / "serial").arrays
    other = lab.run(lab.experiment(algorithm=Odd(), engine__compile="default"), tmp_path / "compiled").arrays
    assert serial
    assert serial == other
    said = [record.getMessage() for record in caplog.records if "engine.compile" in record.getMessage()]
    assert said == ["engine.compile: odd is not compiled (odd of its context is an object without a name of its own)"]


def above(model: Any, batch: Any, context: LossInputs) -> dict[str, Tensor]:
    """A module's function."""
    return {"above": model.features(batch.images).sum()}


def scaled(factor: float) -> Any:
    """A function that is made anew by every call, under one name."""

    def scaled_loss(model: Any, batch: Any, context: LossInputs) -> dict[str, Tensor]:
        return {"scaled": factor * model.features(batch.images).sum()}

    return scaled_loss


@functools.wraps(above)
def wrapped(model: Any, batch: Any, context: LossInputs) -> dict[str, Tensor]:
    """It says that it is called ``above``, and is not."""
    return scaled(2)(model, batch, context)


@dataclass(frozen=True)
class Times:
    """Says its value."""

    factor: Any

    def __call__(self, model: Any, batch: Any, context: LossInputs) -> dict[str, Tensor]:
        return scaled(self.factor)(model, batch, context)


def test_what_is_found_again_under_its_name_has_one() -> None:
    """Methods by their values; another object, a closure and a lambda have none."""
    fine = [None, above, FedAvg().loss, FedProx(mu=0.1).loss, FedProx(mu=0.2).loss, Times(2), Times(3)]
    names = [qualified_name(one) for one in fine]
    assert None not in names
    assert len(set(names)) == len(fine)
    nameless = [scaled(2), lambda model: {}, wrapped, functools.partial(above), nn.Linear(1, 1), Times(scaled(2))]
    assert [qualified_name(one) for one in (*nameless, nn.Linear(1, 1).forward)] == [None] * 7


@dataclass(frozen=True)
class TwoLosses(FedAvg):
    """Two phases, whose losses are made inside of a method."""

    name = "two-losses"

    def phases(self) -> tuple[Phase, ...]:
        return tuple(Phase(loss=scaled(factor)) for factor in (1e-6, -2e-6))


def a_turn(lab: Any, way: str, **changes: Any) -> Any:
    """The reply of client 0 in round 1."""
    experiment = lab.experiment(engine__compile=way, **changes)
    trainer = CompiledTrainer(experiment, lab.DirectMaker()) if way == "default" else None
    found = ClientRunner(experiment, trainer).train(lab.work(experiment, [0]), [0], lambda client: Record())[0]
    assert isinstance(found, tuple)
    return found[0]


def test_losses_without_a_name_are_trained_as_without(lab: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One program under the name of both would train the first twice; here each is the one that was asked for."""
    losses = []
    for way in ("none", "default"):
        losses.append(a_turn(lab, way, algorithm=TwoLosses()).losses)
    assert losses[0] == losses[1]
    assert "two-losses is not compiled (its loss scaled.<locals>.scaled_loss has no name of its own" in caplog.text


def decaying() -> Sgd:
    return Sgd(0.1, weight_decay=5.0)


def plain() -> Sgd:
    return Sgd(0.1)


@dataclass(frozen=True)
class TwoOptimizers(FedAvg):
    """Two phases that differ in a value of the method's own optimiser."""

    name = "two-optimizers"

    def phases(self) -> tuple[Phase, ...]:
        return tuple(Phase(updates=(StepSpec(optimizer=one),)) for one in (decaying, plain))


def test_an_optimizers_values_are_in_a_programs_name(lab: Any) -> None:
    """Under one name the second phase would go on to halve the weights in each step."""
    norms = []
    for way in ("none", "default"):
        weights = a_turn(lab, way, algorithm=TwoOptimizers()).message["model"].params
        norms.append(sum(float(tensor.square().sum()) for tensor in weights.values()))
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def furthest(one: RunState, other: RunState, distance: Any) -> float:
    """How far two servers are apart, but for what a server makes in many steps of its own."""
    left_out = ("calibrated", "exemplars", "generator", "generator_optimizer")
    servers = [
        {name: payload for name, payload in state.server.items() if name not in left_out} for state in (one, other)
    ]
    return float(distance(*servers))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    "method",
    [method for method in METHODS if method not in ("fedpg", "fedavg_q") and not method.startswith("protolda")],
)
def test_compiled_training_of_every_method(
    lab: Any, distance: Any, method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two rounds of up to six steps, against one client after the other; no step of it is refused by the compiler."""
    changes = {
        "method__name": method,
        "model": lab.model_of(method),
        "federation": {"rounds": 2, "participation": 0.75},
    }
    serial = lab.run(lab.experiment(**changes), tmp_path / "serial")
    other = lab.run(lab.experiment(**changes, engine__compile="default"), tmp_path / "compiled")
    assert not [told for record in caplog.records if "is not compiled" in (told := record.getMessage())]
    assert furthest(serial.state, other.state, distance) < 1e-2
    for client in range(4):
        assert distance(serial.client_state(client), other.client_state(client)) < 1e-2


@pytest.mark.slow
@needs_compiler
def test_compiled_steps_read_what_clients_remember_of_each_sample(
    lab: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The distance to the teacher's answers, rows of a table, is the serial trainer's: those of the right samples."""
    changes = {
        "method": {"name": "protolda_distilled", "teacher": {"model.atoms": 6, "model.patch": 5, "model.grid": 2}},
        "model": {"name": "fedgen_cnn"},
        "federation": {"rounds": 1},
    }
    losses = [
        lab.run(lab.experiment(**changes, engine__compile=way), tmp_path / way).history[0]["train_loss"]
        for way in ("none", "default")
    ]
    assert not [told for record in caplog.records if "is not compiled" in (told := record.getMessage())]
    assert losses[0]["distillation"] > 0.01
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("stack", [False, True])
def test_compiled_training_gives_the_same_bytes_whoever_trains(lab: Any, stack: bool, tmp_path: Path) -> None:
    """In this process, again, and by one and two workers."""
    engine = {"compile": "default", "stack": stack, "stack_size": 2}
    first = lab.run(lab.experiment(engine=engine), tmp_path / "first").bytes
    assert lab.run(lab.experiment(engine=engine), tmp_path / "again").bytes == first
    for workers in (1, 2):
        found = lab.run_in_pool(tmp_path / f"{workers}", engine={**engine, "workers": workers}).bytes
        assert {name: found[name] for name in first if name.endswith(".safetensors")} == {
            name: content for name, content in first.items() if name.endswith(".safetensors")
        }


KILLED = """
import sys
from flcore import run
out = sys.argv[1]
run({"data": {"name": "digits"}, "partition": {"num_clients": 4}, "model": {"name": "fedgen_cnn"},
     "method": {"name": "fedproto"}, "federation": {"rounds": 60}, "local": {"lr": 0.05, "batch_size": 16},
     "engine": {"compile": "default"}}, out)
"""


@pytest.mark.slow
@needs_compiler
def test_a_killed_compiled_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    """Killed after some rounds, and started again: model, server and history are those of a run left in peace."""
    script = tmp_path / "run.py"
    script.write_text(KILLED)

    def command(folder: str) -> list[str]:
        return [sys.executable, str(script), str(tmp_path / folder)]

    subprocess.run(command("whole"), check=True, timeout=600)
    history = tmp_path / "killed" / "checkpoint" / "history.jsonl"
    process = subprocess.Popen(command("killed"))
    try:
        deadline = time.monotonic() + 300
        while not (history.exists() and len(history.read_text().splitlines()) >= 5):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert not RunFiles(tmp_path / "killed").metrics.exists()
    subprocess.run(command("killed"), check=True, timeout=600)
    for name in ("model.safetensors", "server.safetensors", "history.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
