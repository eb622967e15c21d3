"""The benchmarks, small: what they print, that all do the same work, that memory and failures are the case's own.

Nothing here has a time limit: how long things take is what the benchmarks are for.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.command import BENCHMARKS, describe, run
from benchmarks.federation import TrainedRun
from benchmarks.measuring import ROOT, Bench, Execution, Timing, paired, steady
from benchmarks.overhead import Options, Overhead
from benchmarks.peers.roster import PEERS, Peer, Peers, environment, start
from benchmarks.work import SHAPES, Work, digest
from benchmarks.workload import bare_rounds, client_data, make_model, train_client, write_inputs
from flcore.core.errors import ConfigError, RunError
from flcore.models import MODELS, build_model
from pipelines.cli import app as cli
from pipelines.cli import commands


def check_contract(result: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """CONTRACT, ``protofl bench``; the cases by name."""
    assert result["name"] == name
    assert json.loads(json.dumps(result)) == result
    assert set(result) == {"name", "machine", "settings", "cases", "ratios"}
    assert {"cores", "torch", "cpu_capability"} <= result["machine"].keys()
    for case in result["cases"]:
        assert {"case", "seconds", "steps_per_second", "peak_mb"} <= case.keys()
        assert 0 < case["seconds"]["min"] <= case["seconds"]["median"] <= case["seconds"]["max"]
        assert case["steps_per_second"] > 0
        assert case["peak_mb"] > 100  # every case is a process with torch in it
    assert all(ratio > 0 for ratio in result["ratios"].values())
    cases = {case["case"]: case for case in result["cases"]}
    assert len(cases) == len(result["cases"])
    return cases


@pytest.fixture
def protofl_bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command with ``--json``, for two rounds, once: what it prints, and what it says meanwhile."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def run(*arguments: str) -> tuple[dict[str, Any], str]:
        assert cli.main(["bench", *arguments, "--json", "--rounds", "2", "--repetitions", "1"]) == 0
        printed = capsys.readouterr()
        return json.loads(printed.out), printed.err

    return run


@pytest.mark.slow
def test_population(protofl_bench: Callable[..., Any]) -> None:
    result, said = protofl_bench("population", "--clients", "10,20")
    cases = {"10 clients", "10 clients, process", "20 clients", "20 clients, process"}
    ratios = {"seconds per round, 20 clients/10 clients", "peak memory, 20 clients/10 clients"}
    assert check_contract(result, "population").keys() == cases
    assert set(result["ratios"]) == ratios
    assert all(f"repetition 1 of 1: {case}\n" in said for case in cases if not case.endswith(", process"))
    text = describe(result)
    assert all(f"  {line} " in text for line in (*cases, *ratios))


@pytest.mark.slow
def test_bare_loop_and_training_without_a_server(tmp_path: Path) -> None:
    """2 rounds of 10 clients with 20 steps: 400 steps, of each case. Clients are trained inside the process."""
    measured = Overhead(Bench("overhead", tmp_path), Work(rounds=2))
    timings = {**measured.bare(), **measured.train()}
    assert timings.keys() == {"bare", "bare_process", "train", "train_rounds", "train_training"}
    assert {timing.steps for timing in timings.values()} == {400}
    assert 0 < timings["train_training"].seconds < timings["train"].seconds
    assert timings["bare"].seconds > 0
    assert timings["train_rounds"].seconds > 0


@pytest.mark.slow
def test_overhead(protofl_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole runs: some of them with two workers, none of them reported to a server that is configured."""
    monkeypatch.setenv("PREFECT_API_URL", "not a server")
    result, _ = protofl_bench("overhead")
    cases, whole = check_contract(result, "overhead"), ("train", "run", "run_1_process")
    assert cases.keys() == {"bare", "bare_process", *(f"{c}{p}" for c in whole for p in ("", "_rounds", "_training"))}
    training, run = (cases[case]["seconds"]["median"] for case in ("run_training", "run"))
    assert result["ratios"]["run beyond its training/run"] == pytest.approx(1 - training / run)
    for case in whole:
        assert cases[case]["bits"] == {"repeated": None, "workers": "same"}
    assert cases["bare"]["bits"] == {"repeated": None, "workers": "one process"}
    assert {case for case in cases if "bits" in cases[case]} == {"bare", *whole}


@pytest.mark.slow
def test_the_network_in_jax_takes_the_same_step(tmp_path: Path) -> None:
    """The first step of the first client, there and here; float32 with sums in other orders."""
    write_inputs(Work(), tmp_path / "inputs.npz")
    code = (
        "import sys; from benchmarks.peers.jax_network import *; from benchmarks.work import Work; "
        "import numpy as np; weights, statistics, images, labels = read_inputs('inputs.npz'); "
        "after = step(weights, statistics, images[0, :32], labels[0, :32], Work()); "
        "np.savez('after.npz', **after[0], **after[1])"
    )
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    subprocess.run([environment("jax", Bench("x", tmp_path)), "-c", code], cwd=tmp_path, check=True)
    module, (images, labels) = make_model(), client_data(Work())[0]
    optimizer = torch.optim.SGD(module.train().parameters(), lr=Work().lr)
    torch.nn.functional.cross_entropy(module(images[:32]), labels[:32]).backward()
    optimizer.step()
    with np.load(tmp_path / "after.npz") as after:
        assert set(after.files) == set(module.state_dict())
        for name, tensor in module.state_dict().items():
            np.testing.assert_allclose(after[name], tensor.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_digest_is_of_the_values_in_the_order_of_names() -> None:
    """1, 3, 2, 4 by rows of the transposed [[1, 2], [3, 4]], then the counter 7: five float32 of four bytes."""
    expected = hashlib.sha256(struct.pack("<5f", 1, 3, 2, 4, 7)).hexdigest()
    tensors = {"b": torch.tensor(7), "a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T}
    assert digest(tensors) == expected
    assert digest({name: tensor.numpy() for name, tensor in tensors.items()}) == expected
    assert digest({"a": tensors["b"], "b": tensors["a"]}) != expected


@pytest.fixture
def no_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing can be fetched, and nothing is there yet; the folder of all that is made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    return tmp_path


def test_a_peer_without_an_environment_has_a_status(
    no_registry: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PEERS, "nobody", Peer("nobody", ("protofl-nobody-has-this==1",), torch=False))
    monkeypatch.setitem(PEERS, "ancient", Peer("ancient", ("numpy==1",), python="2.0"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for _ in range(2):  # the second time a half-made environment is not used
        peers = Peers(["nobody", "ancient", "torch_cuda_graph"], Bench("x", no_registry))
        assert peers.measured == []
        settings = peers.settings()
        for name in ("nobody", "ancient"):
            assert settings[name]["status"].startswith("cannot be installed: ")
            assert "\n" not in settings[name]["status"]
        assert "protofl-nobody-has-this" in settings["nobody"]["status"]
        assert settings["torch_cuda_graph"]["status"] == "no CUDA device"
        assert settings["nobody"]["version"] == "protofl-nobody-has-this 1"
    assert capsys.readouterr().err.count("making an environment for nobody") == 2
    assert peers.attempt("nobody", Work(), "nobody", "nobody_rounds") == {}


def test_an_interpreter_replaces_an_environment(no_registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own versions are reported; a missing package is named."""
    monkeypatch.setitem(PEERS, "numbers", Peer("numbers", ("scipy[extra]==0.0.1",), torch=False))
    monkeypatch.setitem(PEERS, "nobody", Peer("nobody", ("protofl-nobody-has-this==1",), torch=False))
    held = [f"{name} {version(name)}" for name in ("scipy", "numpy")]
    bench = Bench("x", no_registry)
    peers = Peers(["numbers", "nobody"], bench, Path(sys.executable))
    assert peers.measured == ["numbers"]
    assert peers.settings()["numbers"] == {"version": held[0], "requirements": held, "status": "measured"}
    assert f"{sys.executable} lacks one of protofl-nobody-has-this, numpy" in peers.settings()["nobody"]["status"]
    missing = Peers(["numbers"], bench, no_registry / "python")
    assert missing.settings()["numbers"]["status"].endswith("No such file or directory")


@pytest.mark.slow
def test_a_script_without_our_packages_does_all_rounds(tmp_path: Path) -> None:
    bench, work = Bench("x", tmp_path), Work(clients=2, samples=8, cohort=2, steps=2, batch_size=4, rounds=2)
    bare = start(bench, "bare", "workload", work)
    assert bare.digest == digest(bare_rounds(work)[1])
    assert len(bare.rounds) == 2
    code = "import benchmarks.work, sys; print('torch' in sys.modules); import benchmarks.workload; "
    code += "print('flcore' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "scripts", capture_output=True, text=True, check=True
    )
    assert run.stdout == "False\nFalse\n"
    with pytest.raises(RunError, match="nowhere"):
        start(bench, "x", "nowhere", work)


def test_which_peers_are_asked_for() -> None:
    assert Options().named_peers == ()
    assert Options(peers=True).named_peers == tuple(PEERS)
    assert Options(only_peers=("pfl", "jax")).named_peers == ("pfl", "jax")
    assert list(Options(engine=("stack=true",)).own) == ["run", "run_1_process", "run_engine", "run_1_process_engine"]
    with pytest.raises(ConfigError, match=r"^bench overhead: --cases run_engine: expected some of run, run_1_process$"):
        Options(cases=("run_engine",))
    with pytest.raises(ConfigError, match="--only-peers nobody: expected some of torch_cuda_graph, jax, jax_cuda, "):
        run("overhead", only_peers=("nobody",))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("local.lr=1", r"engine.local"),
        ("engine.workers=4", r"--engine workers: "),
        ("workers=4", r"--engine workers: "),
        ("engine.stack", r"engine.stack: expected KEY=VALUE"),
        ("stack=perhaps", r"engine.stack = perhaps"),
        ("engine.what=1", r"engine.what"),
    ],
)
def test_assignments_for_the_engine_are_checked_before_anything_is_measured(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run("overhead", engine=(assignment,))


def test_seconds_of_rounds() -> None:
    """Rounds of 9, 1 and 2 s: at 1.5 s a round, three take 4.5 s. Evaluation, 5 s once, is added and not scaled."""
    assert steady([9.0, 1.0, 2.0]) == 4.5
    rounds = [
        {"train-clients": 8.0, "aggregate": 1.0},
        {"train-clients": 0.5, "aggregate": 0.5},
        {"train-clients": 1.0, "aggregate": 1.0, "evaluate": 5.0},
    ]
    trained = TrainedRun(Execution(20.0, 1.0, ""), rounds)
    assert trained.steady(evaluation=False) == 4.5
    assert trained.steady(evaluation=True) == 9.5
    assert trained.training() == 9.5


def test_ratios_are_paired_by_repetition() -> None:
    """6/2, 8/4 and 30/3 are 3, 2 and 10: the median is 3; that of the seconds alone would be 8/3."""
    series = {name: [Timing(s, 1, 1.0) for s in seconds] for name, seconds in {"a": (6, 8, 30), "b": (2, 4, 3)}.items()}
    assert paired(series, "a", "b") == 3


def test_memory_is_the_commands_own(tmp_path: Path) -> None:
    """This process has torch, hundreds of megabytes; a bare interpreter has not, and one with 64 MB of text has those.

    The least that is seen are the launcher's own megabytes, a few more than a bare interpreter's.
    """
    peaks = []
    for size in (0, 64):
        Bench("x", tmp_path).execute("case", [sys.executable, "-S", "-c", f"x = b'1' * {size} * 2**20"])
        peaks.append(json.loads((tmp_path / "launched.json").read_text())["peak_mb"])
    assert peaks[0] < 40
    assert 50 < peaks[1] - peaks[0] < 80


def test_a_case_that_fails_stops_the_benchmark_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="bench x, some case: failed with exit code 3: the last line"):
        Bench("x", tmp_path).execute(
            "some case",
            [sys.executable, "-c", "import sys; print('one\\nthe last line', file=sys.stderr); sys.exit(3)"],
        )


def test_the_command_finds_them_in_a_checkout_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the package is installed there is no pyproject.toml beside it, whatever folder is called benchmarks."""
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(commands, "CHECKOUT", tmp_path)
    assert cli.main(["bench", "gpu", "--help"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    code = "import sys; from pipelines.cli.commands import make_app; make_app(); sys.exit('benchmarks' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["population", "--peers"], "protofl bench population: no option --peers"),
        (["overhead", "--workers", "1"], "protofl bench overhead: no option --workers"),
        (["overhead", "--rounds", "1"], "--rounds '1'"),
        (["overhead", "--repetitions", "0"], "--repetitions '0'"),
        (["population", "--clients", "9,100"], "--clients 9: a round needs 10"),
        (["what"], "overhead, comparison, models, population, gpu"),
        ([], "overhead, comparison, models, population, gpu"),
    ],
)
def test_options_are_refused_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert cli.main(["bench", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_has_help_and_a_line_in_that_of_the_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", name, "--help"]) == 0
    said = capsys.readouterr().out
    assert {"--json", "--rounds", "--repetitions"} <= set(said.split())
    assert cli.main(["bench", "--help"]) == 0
    assert f"\n  {name} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "parameters", "modes"), [("fedgen_cnn", 26_434, (True, False)), ("pfl_cnn", 1_626_442, (False,))]
)
def test_everybody_trains_the_same_network(name: str, parameters: int, modes: tuple[bool, ...]) -> None:
    """``workload`` writes the network down again: same parameters in the same order, same answers.

    ``pfl_cnn`` drops at random in training.
    """
    shape = SHAPES[name]
    ours, theirs = build_model(MODELS[name](), shape, 10, seed=3), make_model(model=name)
    own, other = ours.state_dict(), theirs.state_dict()
    assert [t.shape for t in own.values()] == [t.shape for t in other.values()]
    assert sum(p.numel() for p in theirs.parameters()) == parameters
    theirs.load_state_dict(dict(zip(other, own.values(), strict=True)))
    images = torch.rand(4, *shape, generator=torch.Generator().manual_seed(0))
    for mode in modes:
        torch.testing.assert_close(ours.train(mode)(images)[1], theirs.train(mode)(images))


def test_everybody_takes_as_many_steps() -> None:
    """BatchNorm counts them. 7 steps of 32 of 96 samples are two passes and one batch more."""
    work = Work(clients=3, samples=96, cohort=2, steps=7, rounds=2)
    module, (images, labels) = make_model(), client_data(work)[1]
    assert images.shape == (96, 1, 28, 28)
    assert len(client_data(work)) == 3
    before = module[0].weight.detach().clone()
    train_client(module, images, labels, work, torch.Generator().manual_seed(0))
    assert int(module[1].num_batches_tracked) == 7
    assert not torch.equal(module[0].weight, before)
    assert work.total_steps == 2 * 2 * 7
    seconds, weights = bare_rounds(work)
    assert len(seconds) == 2
    assert weights.keys() == module.state_dict().keys()
