"""The benchmarks, small: what they print, that all do the same work, that memory and failures are the case's own.

Nothing here has a time limit: how long things take is what the benchmarks are for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.errors import ConfigError, RunError
from flcore.models import MODELS, build_model
from pipelines import bench
from pipelines.bench import common, launch
from pipelines.bench.common import Bench, BenchOptions, Execution, Timing, TrainedRun, paired, steady
from pipelines.bench.overhead import Overhead
from pipelines.bench.peers.environment import PEERS, copy_scripts, environment_folder, peer_python
from pipelines.bench.workload import Work, bare_rounds, client_data, make_model, train_client
from pipelines.cli import app as cli


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


SMALL: dict[str, tuple[list[str], set[str], set[str]]] = {
    "population": (
        ["--clients", "10,20"],
        {"10 clients", "10 clients, process", "20 clients", "20 clients, process"},
        {"seconds per round, 20 clients/10 clients", "peak memory, 20 clients/10 clients"},
    ),
    "workers": (
        ["--workers", "1"],
        {"0 workers", "0 workers, process", "1 workers", "1 workers, process"},
        {"speed-up of 1 workers"},
    ),
    "stack": (
        ["--group-sizes", "8", "--devices", "cpu"],
        {"cpu, serial", "cpu, 8 stacked"},
        {"speed-up of cpu, 8 stacked"},
    ),
    "cifar10-cross-device": (
        ["--scale", "0.02", "--devices", "cpu"],
        {f"cpu, 0 workers{kind}{part}" for kind in ("", ", stacked") for part in ("", ", process")},
        {"cpu, 0 workers, stacked/cpu, 0 workers"},
    ),
}


@pytest.fixture
def protofl_bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command with ``--json``, for two rounds, once: what it prints, and what it says meanwhile."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def run(*arguments: str) -> tuple[dict[str, Any], str]:
        assert cli.main(["bench", *arguments, "--json", "--rounds", "2", "--repetitions", "1"]) == 0
        printed = capsys.readouterr()
        return json.loads(printed.out), printed.err

    return run


@pytest.mark.parametrize("name", SMALL)
def test_cases_and_ratios(name: str, protofl_bench: Callable[..., Any]) -> None:
    arguments, cases, ratios = SMALL[name]
    result, said = protofl_bench(name, *arguments)
    found = check_contract(result, name)
    assert found.keys() == cases
    assert set(result["ratios"]) == ratios
    assert all(f"repetition 1 of 1: {case}\n" in said for case in cases if not case.endswith(", process"))
    text = bench.describe(result)
    assert all(f"  {line} " in text for line in (*cases, *ratios))


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
    cases, whole = check_contract(result, "overhead"), ("train", "run", "run_2_workers")
    assert cases.keys() == {"bare", "bare_process", *(f"{c}{p}" for c in whole for p in ("", "_rounds", "_training"))}
    training, run = (cases[case]["seconds"]["median"] for case in ("run_training", "run"))
    assert result["ratios"]["run beyond its training/run"] == pytest.approx(1 - training / run)


@pytest.mark.slow
def test_overhead_beside_the_peers() -> None:
    """Makes the peers' environments if they are not there, which needs a package registry."""
    result = bench.run("overhead", {"rounds": 3, "repetitions": 1, "peers": True})
    cases = check_contract(json.loads(json.dumps(result)), "overhead")
    assert {"flower", "flower_rounds", "pfl", "pfl_rounds"} <= cases.keys()
    assert {"flower/run", "pfl/run", "flower_rounds/run_2_workers_rounds"} <= result["ratios"].keys()
    for peer in ("flower", "pfl"):
        assert cases[f"{peer}_rounds"]["seconds"]["median"] < cases[peer]["seconds"]["median"]


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


def test_cases_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = []

    def case(name: str) -> dict[str, Timing]:
        turns.append(name)
        return {name: Timing(float(len(turns)), 1, 1.0)}

    series = Bench("x", tmp_path).alternate({"a": lambda: case("a"), "b": lambda: case("b")}, 2)
    assert turns == ["a", "b", "a", "b"]
    assert [timing.seconds for timing in series["b"]] == [2.0, 4.0]


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


def test_the_launcher_imports_little() -> None:
    code = f"import sys; sys.argv = ['x']; exec(open({launch.__file__!r}).read().split('if __name__')[0]); "
    code += "print(len([name for name in ('torch', 'numpy', 'pathlib', 'typing') if name in sys.modules]))"
    assert subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, check=True).stdout == b"0\n"


def test_a_case_that_fails_stops_the_benchmark_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="bench x, some case: failed with exit code 3: the last line"):
        Bench("x", tmp_path).execute(
            "some case",
            [sys.executable, "-c", "import sys; print('one\\nthe last line', file=sys.stderr); sys.exit(3)"],
        )


def test_nothing_heavy_is_imported_with_the_list() -> None:
    code = "import sys, pipelines.bench; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=common.ROOT).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["population", "--peers"],
            "bench population: has no option --peers; it has --clients, --repetitions, --rounds",
        ),
        (["overhead", "--workers", "1"], "bench overhead: has no option --workers"),
        (["overhead", "--rounds", "1"], "--rounds = 1: must be 2 or more"),
        (["population", "--clients", "9,100"], "--clients 9: a round needs 10"),
        (["stack", "--model", "what"], "model.name = what"),
        (["cifar10-cross-device", "--scale", "2"], "--scale 2: must be from 0.02 to 1"),
    ],
)
def test_options_are_refused_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_options_that_no_command_line_gives_are_refused_too() -> None:
    with pytest.raises(ConfigError, match="--repetitions = 0: must be 1 or more"):
        bench.run("workers", {"repetitions": 0})
    with pytest.raises(ConfigError, match="--group-sizes: names nothing"):
        bench.run("stack", {"group_sizes": ()})


def test_defaults_can_be_built() -> None:
    from pipelines.bench import cross_device, overhead, population, stack, workers

    for module in (cross_device, overhead, population, stack, workers):
        assert isinstance(module.Options(), BenchOptions)
    assert workers.powers_of_two(6) == (1, 2, 4, 6)
    assert workers.powers_of_two(8) == (1, 2, 4, 8)


def test_everybody_trains_the_same_network() -> None:
    """``workload`` writes the network down again: same parameters in the same order, same answers."""
    ours, theirs = build_model(MODELS["fedgen_cnn"](), (1, 28, 28), 10, seed=3), make_model()
    own, other = ours.state_dict(), theirs.state_dict()
    assert [t.shape for t in own.values()] == [t.shape for t in other.values()]
    assert sum(p.numel() for p in theirs.parameters()) == 26_434
    theirs.load_state_dict(dict(zip(other, own.values(), strict=True)))
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    for mode in (True, False):
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
    assert len(bare_rounds(work)) == 2


def test_the_spine_is_one_epoch() -> None:
    """pfl counts epochs: 20 steps of 32 must be the 640 samples of a client."""
    work = Work()
    assert work.steps * work.batch_size == work.samples


def test_peers_have_our_torch_and_a_folder_for_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = {environment_folder(peer) for peer in PEERS.values()}
    assert len(folders) == len(PEERS)
    assert all(folder.parent == tmp_path / "protofl" and folder.name.startswith("bench-peers-") for folder in folders)
    for peer in PEERS.values():
        assert f"torch=={torch.__version__.split('+')[0]}" in peer.requirements
        assert all("==" in requirement for requirement in peer.requirements)


def test_peers_see_only_what_runs_there(tmp_path: Path) -> None:
    copied = {path.relative_to(tmp_path).as_posix() for path in copy_scripts(tmp_path).rglob("*.py")}
    assert {f"{peer.module.replace('.', '/')}.py" for peer in PEERS.values()} < copied
    assert {path for path in copied if not path.startswith("pipelines/bench/")} == {"pipelines/__init__.py"}
    code = "import sys; from pipelines.bench.workload import make_model; make_model(); print('flcore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_without_a_registry_one_is_told_and_nothing_is_left_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    said: list[str] = []
    for _ in range(2):  # the second time it is not taken for made
        with pytest.raises(RunError, match=r"no environment for pfl: the package registry cannot be reached"):
            peer_python("pfl", said.append)
    assert len([text for text in said if "making an environment for pfl" in text]) == 2


def test_an_environment_that_is_there_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = environment_folder(PEERS["pfl"])
    folder.mkdir(parents=True)
    (folder / "ready").touch()
    assert peer_python("pfl", pytest.fail) == str(folder / "bin" / "python")


def test_an_unknown_option_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="has no option --colour; it has --devices, --group-sizes, --model, "):
        bench.run("stack", {"colour": "red"})
