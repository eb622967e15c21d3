"""The command as a whole: it starts fast, and every failure is a line or two on standard error and an exit code."""

from __future__ import annotations

import errno
import getpass
import os
import pwd
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flcore.core.errors import ConfigError, DataError, RunError
from flcore.core.host import user_cache
from flcore.version import VERSION
from pipelines.cli import app, machine, train
from pipelines.cli.options import Common, Out
from tests.cases import quick

HEAVY = ("torch", "numpy", "prefect", "mlflow", "pandas", "matplotlib", "optuna", "dvc")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, check=False)


# ------------------------------------------------------------------------------------------------------------- start


def test_what_needs_no_library_imports_none() -> None:
    """And a run's parameters are read without torch: the process that records starts before it is imported."""
    code = f"""
import contextlib, io, sys
import pipelines.cli
from pathlib import Path
from pipelines.cli.app import main
from pipelines.cli.options import Values
said = io.StringIO()
for words in (["--help"], ["--version"], ["run", "--help"], ["run", "--bogus"], ["list", "methods"], []):
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        main(words)
assert "rich" not in sys.modules
with contextlib.redirect_stdout(said):
    main(["completion", "bash"])
assert not set({HEAVY!r}) & set(sys.modules), set({HEAVY!r}) & set(sys.modules)
from pipelines.plan.params import for_entry
open("mine.py", "w")
open("params.yaml", "w").write("plugins: [mine.py]\\ncompare: {{settings: {{fedpa: {{local.lr: 0.3}}}}}}\\n")
values = Values(assignments=("local.epochs=2",), plugins=(Path("other.py"),))
options = {{"--method": ("method.name", "fedpa"), "--seed": ("seed", 3)}}
raw = for_entry(values.read(options, without_effect={{}}, method="fedpa"), "fedpa", 3)
assert raw["local"] == {{"epochs": 2, "lr": 0.3}} and raw["seed"] == 3 and raw["method"] == {{"name": "fedpa"}}
assert [path.rpartition("/")[2] for path in raw["plugins"]] == ["mine.py", "other.py"]
import pipelines.orchestration.commands
print(sorted(set({HEAVY!r}) & set(sys.modules)))
"""
    done = python("-c", code)
    assert (done.stderr, done.stdout) == ("", "['numpy']\n")  # of the sections of a configuration


def test_help_takes_a_moment() -> None:
    """In the processor time of an empty program (0.03 s on two cores, help 0.27 s), since load slows both."""

    def seconds(*words: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert python(*words).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    ratios = (seconds("-m", "pipelines.cli", "--help") / seconds("-c", "pass") for _ in range(4))
    assert min(ratios) < 16


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for words, out in (
        (["--version"], f"protofl {VERSION}\n"),
        (["--help"], "usage: protofl COMMAND [OPTION]...\n"),
        (["down", "--help"], "usage: protofl down\n\n"),
    ):
        assert app.main(words) == 0
        assert capsys.readouterr().out.startswith(out)
    assert app.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(f"\n  {name} " in captured.err for name in ("run", "compare", "doctor", "completion"))
    assert "130 interrupted" in captured.err


# ---------------------------------------------------------------------------------------------------------- failures


def failing(error: BaseException) -> Callable[..., int]:
    def command(*, common: Common = Common()) -> int:
        raise error

    return command


def outcome(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, str]:
    monkeypatch.setattr(machine, "doctor", failing(error))
    code = app.main(["doctor", *more])
    captured = capsys.readouterr()
    assert captured.out == ""
    return code, captured.err


def os_error(number: int, path: str | None) -> OSError:
    return OSError(number, os.strerror(number), path) if path else OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("local.lr = 0: must be > 0"), 2, "local.lr = 0: must be > 0"),
        (DataError("x: damaged"), 3, "x: damaged"),
        (RunError("round 3, client 0007: lost", "Traceback of a worker"), 4, "round 3, client 0007: lost"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (os_error(errno.ENOSPC, "runs/x"), 4, "runs/x: the disk is full"),
        (os_error(errno.EIO, "runs/x"), 4, "runs/x: "),
        (os_error(errno.ENOSPC, None), 4, "a file: the disk is full"),
        (os_error(errno.EROFS, "a/b"), 2, "a/b: cannot write there (Read-only file system)"),
        (os_error(errno.ENOTDIR, "a/b"), 2, "a/b: cannot write there (Not a directory)"),
    ],
    ids=str,
)
def test_a_failure_is_told_in_a_line_and_by_its_exit_code(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, message = outcome(error, monkeypatch, capsys)
    assert found == code
    assert message.startswith(f"protofl: {said}") and message.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("what\n  Traceback (most recent call last):\n  File ..."), "unexpected ValueError: what\n"),
        (KeyError(), "unexpected KeyError\n"),
        (os_error(errno.EIO, None), "unexpected OSError: [Errno 5] Input/output error\n"),
    ],
)
def test_a_fault_of_ours_is_called_one(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = f"protofl: {said}This is a fault of protofl; see it with --debug.\n"
    assert outcome(error, monkeypatch, capsys) == (1, told)


def test_a_traceback_is_shown_with_debug_alone_that_of_a_worker_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = RunError("round 3: lost", "Traceback of a worker\n  x = 1 / 0")
    code, said = outcome(error, monkeypatch, capsys, "--debug")
    assert code == 4
    assert re.match(r"Traceback \(most recent call last\):\n.*in command\n", said, re.DOTALL)
    assert said.endswith("Traceback of a worker\n  x = 1 / 0\nprotofl: round 3: lost\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read and write anywhere")
def test_a_file_that_may_not_be_read_is_not_one_that_cannot_be_written(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / "params.yaml").write_text("seed: 0\n")
    (empty_folder / "params.yaml").chmod(0)
    assert app.main(["run"]) == 2
    assert "params.yaml: cannot be read (Permission denied)" in capsys.readouterr().err


@pytest.mark.parametrize(("mode", "code", "said"), [(True, 2, "cannot write there"), (False, 3, "cannot be read")])
def test_a_permission_that_is_missing_is_told_as_what_it_is(
    mode: bool,
    code: int,
    said: str,
    empty_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A folder that may be read and not written, and data that may not even be read; whoever runs the tests."""
    monkeypatch.setattr(os, "access", lambda *asked, **how: mode)
    error = os_error(errno.EACCES, str(empty_folder / "images.zip"))
    assert isinstance(error, PermissionError)
    assert outcome(error, monkeypatch, capsys)[0] == code
    assert said in outcome(error, monkeypatch, capsys)[1]


@pytest.mark.parametrize(
    ("number", "path", "cure"),
    [
        (errno.EROFS, ".protofl", "caches and logs go below the folder that a command is typed in: cd to one that can"),
        (errno.EROFS, ".protofl/logs/follower.log", "caches and logs go below the folder that a command is typed in:"),
        (
            errno.ENOENT,
            ".protofl",
            "caches and logs go below the folder that a command is typed in: cd to one that can",
        ),
        (errno.EROFS, "/elsewhere/cache/index", "name another folder in PROTOFL_CACHE"),
        (errno.EROFS, "/elsewhere/user/protofl/steps", "name another folder in XDG_CACHE_HOME"),
        (errno.EROFS, "/elsewhere/run", "choose another --out"),
    ],
)
def test_where_else_to_write_depends_on_what_was_to_be_written(
    number: int, path: str, cure: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PROTOFL_CACHE", "/elsewhere/cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere/user")
    code, said = outcome(os_error(number, path), monkeypatch, capsys)
    assert code == 2
    assert said.startswith(f"protofl: {path}: cannot write there ({os.strerror(number)}); {cure}")


def test_a_folder_that_is_gone_is_no_fault_of_ours(tmp_path: Path) -> None:
    """Somebody has deleted the folder of the shell."""
    (tmp_path / "gone").mkdir()
    done = subprocess.run(
        f"cd {tmp_path / 'gone'} && rmdir {tmp_path / 'gone'} && {sys.executable} -m pipelines.cli run",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "cd to one that can be written to" in done.stderr


def test_a_working_folder_that_is_removed_meanwhile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """First the folder that the command was typed in, then the one that its results go to."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")

    def removed() -> int:
        (tmp_path / "gone").rmdir()
        Path("x").absolute()
        return 0

    monkeypatch.setattr(machine, "doctor", removed)
    assert app.main(["doctor"]) == 4
    said = capsys.readouterr().err
    assert "was removed" in said and said.count("\n") == 1
    monkeypatch.chdir(tmp_path)
    code, said = outcome(os_error(errno.ENOENT, str(tmp_path / "run" / "config.json")), monkeypatch, capsys)
    assert code == 4 and f"{tmp_path / 'run'}: was removed" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (os_error(errno.EFBIG, "runs/x"), ["runs/x", "4096 bytes", "ulimit -f"]),
        (os_error(errno.ENOMEM, None), ["memory", "512 MB", "ulimit -v"]),
        (MemoryError(), ["memory", "512 MB", "ulimit -v"]),
        (ImportError("libx.so: failed to map segment from shared object"), ["memory", "512 MB", "ulimit -v"]),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), ["memory", "512 MB", "ulimit -v"]),
    ],
)
def test_a_limit_of_the_shell_is_named(
    error: Exception, named: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """512 MB are 2^29 bytes."""
    limits = {resource.RLIMIT_FSIZE: (4096, 4096), resource.RLIMIT_AS: (1 << 29, 1 << 29)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    code, said = outcome(error, monkeypatch, capsys)
    assert code == 4 and said.count("\n") == 1
    assert all(words in said for words in named)


def test_a_user_without_home_has_one_below_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container that is started with a number that no user has."""

    def nobody(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")  # so that what the command sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    homes: list[Path] = []

    def look() -> int:
        homes.append(Path.home())
        assert user_cache().is_relative_to(Path.home())
        assert getpass.getuser()
        return 0

    monkeypatch.setattr(machine, "doctor", look)
    assert app.main(["doctor"]) == 0, capsys.readouterr().err
    assert homes == [tmp_path / ".protofl" / "home"]


def test_whoever_reads_our_output_may_have_enough(empty_folder: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m pipelines.cli list methods | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.split()[0], done.stderr) == ("local", "")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    quick(
        [
            ("list methods > /dev/full", 4, "the disk is full"),
            ("list methods <&- >&- 2>&-", 0, ""),
            ("run --set nope=1 2>&-", 2, ""),
            ("run --set nope=1 2> /dev/full", 2, ""),
            ("list methods < /dev/null 1<&0", 4, "standard output: cannot be written"),
            ("list methods >&-", 0, ""),
        ],
        2,
    ),
)
def test_output_that_cannot_be_written_is_told(words: str, code: int, said: str, empty_folder: Path) -> None:
    command = f"{sys.executable} -m pipelines.cli {words}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (code, bool(said)), done.stderr
    assert said in done.stderr


def test_an_interrupt_while_python_imports_is_a_line() -> None:
    code = """
import sys
from pipelines.cli.__main__ import main
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "pipelines.cli.app":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
sys.exit(main())
"""
    done = python("-c", code)
    assert done.returncode == 130
    assert done.stderr.startswith("protofl: interrupted") and done.stderr.count("\n") == 1


SMALL = (
    "--set data.limit_per_class=20 --set partition.num_clients=3 --set partition.min_size=5 --set federation.rounds=2 "
    "--set tracking.enabled=false"
)


def hindered(words: str) -> str:
    """What a command prints without standard error, in ASCII, with warnings as errors and an unknown backend."""
    variables = {"PYTHONIOENCODING": "ascii", "PYTHONWARNINGS": "error", "MPLBACKEND": "nope"}
    done = subprocess.run(
        f"exec {sys.executable} -m pipelines.cli {words} 2>&-",
        env=os.environ | variables,
        shell=True,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode("ascii")


def test_neither_a_closed_stream_nor_ascii_nor_variables_of_libraries_end_a_list() -> None:
    assert "fedavg" in hindered("list methods")


@pytest.mark.slow
def test_neither_a_closed_stream_nor_ascii_nor_variables_of_libraries_end_a_comparison(empty_folder: Path) -> None:
    words = f"compare {SMALL.removesuffix('--set tracking.enabled=false')} --methods fedavg,local --seeds 0 --out all"
    table = hindered(f"{words} --orchestrator inline")
    assert "fedavg" in table and r"mean \xb1 std" in table
    assert (empty_folder / "all" / "report.html").exists()
    assert (empty_folder / "mlruns" / "mlflow.db").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_is_repeated_is_a_line_and_an_exit_code(empty_folder: Path, number: signal.Signals) -> None:
    """While the first stops the command, and while Python exits; each would print a traceback."""
    code = """
import os, signal, sys, threading, time
import pipelines.cli.__main__ as entry
from pipelines.cli import app

number = int(sys.argv[1])
entry._SECONDS_TO_STOP = 60  # on a busy machine
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background has not
main = entry.main

def keep_pressing():
    while True:
        time.sleep(0.005)
        os.kill(os.getpid(), number)

def work():
    threading.Thread(target=keep_pressing, daemon=True).start()
    try:
        time.sleep(60)
    finally:
        time.sleep(0.3)  # what it leaves behind
        open("stopped", "w").close()

import pipelines.cli.machine as machine
machine.doctor = work
sys.argv = ["protofl", "doctor"]
code = main()
time.sleep(0.1)
sys.exit(code)
"""
    done = python("-c", code, str(int(number)))
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.startswith("protofl: interrupted") and done.stderr.count("\n") == 1
    assert (empty_folder / "stopped").exists()


def test_ctrl_c_that_still_comes_after_seconds_ends_what_does_not_stop(empty_folder: Path) -> None:
    code = """
import os, signal, sys, time
import pipelines.cli.__main__ as entry
import pipelines.cli.machine as machine

def work():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    finally:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

entry._SECONDS_TO_STOP = 0.01
signal.signal(signal.SIGINT, signal.default_int_handler)
machine.doctor = work
sys.argv = ["protofl", "doctor"]
sys.exit(entry.main())
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr.count("\n")) == (130, 1)


@pytest.mark.slow
def test_a_log_that_nobody_reads_any_more_ends_no_run(empty_folder: Path) -> None:
    """Its reader goes after the first of the many lines of two runs side by side; one of them fails, which is kept."""
    said = f"compare {SMALL} --variant bad=local,local.lr=1e30 --methods fedavg,bad --seeds 0 --out all"
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli", *said.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(300) == 4
    assert [path.parent.name[:6] for path in empty_folder.glob("all/runs/*/metrics.json")] == ["fedavg"]
    assert (empty_folder / "all" / "report.html").exists()


def test_a_pipe_that_breaks_elsewhere_is_no_end_of_work(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "doctor", failing(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    assert app.main(["doctor"]) == 1
    assert "unexpected BrokenPipeError" in capfd.readouterr().err


def test_a_folder_is_dated_by_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def compare(*, out: Out = Path("runs/comparison")) -> None:
        seen.append(out)

    monkeypatch.setattr(train, "compare", compare)
    before = datetime.now(UTC).date()
    assert app.main(["compare", "--out", "runs/{date}/[v1]"]) == app.main(["compare"]) == 0
    assert seen[0] in (Path(f"runs/{day}/[v1]") for day in (before, datetime.now(UTC).date()))
    assert seen[1] == Path("runs/comparison")


@pytest.mark.parametrize(
    "command", ["run --set tracking.enabled=false", "stage prepare", "doctor", "show method fedavg"]
)
def test_a_plug_in_that_cannot_be_used_stops_every_command(
    command: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty_folder / "broken.py").write_text("x = (\n")
    assert app.main([*command.split(), "--plugin", "broken.py"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"protofl: plug-in {empty_folder}/broken.py:1: '(' was never closed\n")
