"""Services in the background: real processes, small ones in place of the servers (those: tests/services)."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import yaml

from flcore.core.errors import ConfigError, RunError
from pipelines.orchestration import background, plans, services
from pipelines.orchestration.background import Service

PROJECT = Path(__file__).resolve().parents[3]

SERVER = """\
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(helper.pid, flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""
"""Answers every question, and has a helper in a session of its own, as servers and workers have."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own, in which nothing runs afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    (tmp_path / "server.py").write_text(SERVER)
    plan = _plan(str(tmp_path / "server.py"))
    for name in ("prefect", "dashboard"):
        monkeypatch.setattr(plans, name, plan)
    monkeypatch.setattr(plans, "mlflow", lambda port, address: plan(port))
    yield tmp_path
    for name in ("prefect", "mlflow", "dashboard", "sleeper"):
        background.stop(name)


def _plan(script: str):
    return lambda port: plans.Plan(f"http://127.0.0.1:{port}", [script, str(port)])


def helper_of(name: str) -> psutil.Process:
    return psutil.Process(int((background.LOGS / f"{name}.log").read_text().split()[0]))


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def sleeper() -> Service:
    return background.start("sleeper", "http://x", [sys.executable, "-c", "import time; time.sleep(600)"], {})


@pytest.mark.slow
def test_up_status_again_down(capsys: pytest.CaptureFixture[str]) -> None:
    """All start and are found again; a second `up` starts only what has ended; `down` leaves nothing."""
    services.up(worker=False)
    first = {service.name: service for service in background.recorded()}
    assert set(first) == {"prefect", "mlflow", "dashboard"}
    shown = capsys.readouterr().out
    assert all(service.url in shown for service in first.values())
    assert f"\nexport PREFECT_API_URL={first['prefect'].url}\n" in shown
    helpers = [helper_of(name) for name in first]

    assert services.status(as_json=True)
    assert {entry["state"] for entry in json.loads(capsys.readouterr().out)} == {"healthy"}

    os.kill(first["mlflow"].pid, signal.SIGKILL)
    psutil.Process(first["mlflow"].pid).wait(10)
    assert not services.status()
    assert "ended" in capsys.readouterr().out
    services.up(worker=False)
    again = {service.name: service for service in background.recorded()}
    assert {name for name in first if again[name] != first[name]} == {"mlflow"}
    assert "mlflow.before.log" in capsys.readouterr().err
    helpers.append(helper_of("mlflow"))

    services.down()
    shown = capsys.readouterr().out
    assert all(f"{name}: stopped" in shown for name in first)
    assert not background.STATE.exists() and background.recorded() == []
    assert all(is_gone(helper) for helper in helpers)
    assert not any(background.is_running(service) for service in again.values())
    services.down()
    assert "nothing" in capsys.readouterr().out
    assert not services.status()  # nothing was started, which a script wants to know


def test_where_commands_report_to_is_told_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server of ``prefect.toml`` is taken before the one that was started; where none was, none is spoken of."""
    monkeypatch.setenv("HOME", str(folder))
    services.up(prefect=False, mlflow=False, dashboard=False, worker=False)
    assert capsys.readouterr().out == ""
    services.up(mlflow=False, dashboard=False, worker=False)
    assert "commands typed here report to these servers" in capsys.readouterr().out
    (folder / "prefect.toml").write_text('[api]\nurl = "http://me:hidden@lab/api"\n')
    services.up(mlflow=False, dashboard=False, worker=False)
    shown = capsys.readouterr().out
    assert "note: commands report to http://***@lab/api (from prefect.toml) and not to this server" in shown
    [own] = background.recorded()
    monkeypatch.setenv("PREFECT_API_URL", own.url)
    services.up(mlflow=False, dashboard=False, worker=False)
    assert "commands typed here report to these servers" in capsys.readouterr().out


def test_a_taken_port_is_left_to_who_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        services._PORTS["dashboard"], usual = port, services._PORTS["dashboard"]
        try:
            services.up(prefect=False, mlflow=False, worker=False)
        finally:
            services._PORTS["dashboard"] = usual
    [service] = background.recorded()
    assert service.url.startswith("http://127.0.0.1:") and service.url != f"http://127.0.0.1:{port}"


def test_two_folders_that_start_at_once_get_a_port_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server listens some time after its port was chosen; until then the port looks free to the other folder."""
    (folder / "slow.py").write_text(f"import time\ntime.sleep(1)\n{SERVER}")
    monkeypatch.setattr(plans, "prefect", _plan(str(folder / "slow.py")))

    def up(place: Path) -> None:
        place.mkdir()
        os.chdir(place)
        services.up(mlflow=False, dashboard=False, worker=False)

    places = [folder / "one", folder / "two"]
    processes = [multiprocessing.get_context("fork").Process(target=up, args=(place,)) for place in places]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    found = []
    for place in places:
        monkeypatch.chdir(place)
        found += background.recorded()
        assert services.status()
        services.down()
    assert len({service.url for service in found}) == len(found) == 2


def test_one_that_does_not_start_is_named_and_the_others_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "broken.py").write_text("raise SystemExit('no such table: runs')")
    monkeypatch.setattr(plans, "dashboard", _plan(str(folder / "broken.py")))
    with pytest.raises(RunError, match=r"dashboard did not start; .*dashboard\.log says why: no such table: runs"):
        services.up(prefect=False, worker=False)
    assert [service.name for service in background.recorded()] == ["mlflow"]


def test_where_runs_go_to_a_server_none_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hidden@host:5000")
    services.up(prefect=False, dashboard=False, worker=False)
    shown = capsys.readouterr().out
    assert "http://***@host:5000" in shown and "hidden" not in shown
    assert background.recorded() == []


def test_only_what_was_started_here_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process with a recorded number is not, nor one of the same name in another folder."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    other = tmp_path / "other"
    other.mkdir()
    try:
        begun = int(Path(f"/proc/{stranger.pid}/stat").read_text().rpartition(")")[2].split()[19])
        recycled = Service("sleeper", "http://x", stranger.pid, time.time(), "log", ticks=begun)
        assert not background.is_running(recycled)
        background.record([recycled])
        services.up(prefect=False, mlflow=False, dashboard=False, worker=False)
        assert background.recorded() == []

        mine = sleeper()
        assert background.is_running(mine)
        assert mine.ticks is not None
        assert not background.is_running(replace(mine, ticks=mine.ticks - 1))  # one that had its number before
        monkeypatch.chdir(other)
        background.stop("sleeper")
        assert psutil.Process(mine.pid).is_running()
        monkeypatch.chdir(tmp_path)
        background.stop("sleeper")
        assert not background.is_running(mine)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_what_ignores_the_polite_signal_is_ended_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_SECONDS_TO_END", 0.3)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\n"
    service = background.start("sleeper", "http://x", [sys.executable, "-c", deaf + "time.sleep(600)"], {})
    while "deaf" not in Path(service.log).read_text():
        time.sleep(0.05)
    background.stop("sleeper")
    assert not background.is_running(service)


def test_a_damaged_record_is_none() -> None:
    background.HOME.mkdir()
    for text in ("", "[]", '{"services": [{"name": "prefect"}]}', '{"services": 1}'):
        background.STATE.write_text(text)
        assert background.recorded() == []


def test_a_password_of_the_store_is_no_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are seen by everybody on the machine."""
    monkeypatch.undo()
    plan = plans.mlflow(5000, "postgresql://me:hidden@host/runs")
    assert "hidden" not in " ".join(plan.arguments)
    assert plan.environment["MLFLOW_BACKEND_STORE_URI"] == "postgresql://me:hidden@host/runs"


def test_the_committed_deployments_are_scheduled_in_utc_and_name_no_path() -> None:
    """What is committed must deploy from any folder on any machine."""
    text = (PROJECT / "infra" / "prefect.yaml").read_text()
    found = {each["name"]: each for each in yaml.safe_load(text)["deployments"]}
    assert {name: each["entrypoint"].rsplit(".", 1)[1] for name, each in found.items()} == {
        "nightly-comparison": "compare",
        "weekly-tuning": "tune",
        "retrain-on-new-data": "retrain_on_new_data",
        "paper-table": "paper_table",
    }
    schedules = [schedule for each in found.values() for schedule in each["schedules"]]
    assert [(schedule["cron"], schedule["timezone"]) for schedule in schedules] == [
        ("0 3 * * *", "UTC"),
        ("0 4 * * 6", "UTC"),
        ("0 2 * * *", "UTC"),
        ("0 6 1 * *", "UTC"),
    ]
    assert not any(schedule["active"] for schedule in schedules), "whoever looks around has no runs at night"
    assert str(PROJECT) not in text


def test_a_worker_for_the_cpu_and_one_for_each_gpu_that_sees_no_other() -> None:
    """Two GPUs: the worker of the queue ``cpu`` sees neither, or a flow of it would train beside those of ``gpu``."""
    api = "http://127.0.0.1:4200/api"
    found = {name: plan(8090) for name, plan in plans.workers(api, ["0", "3"], 2).items()}
    assert {name: plan.environment["CUDA_VISIBLE_DEVICES"] for name, plan in found.items()} == {
        "worker": "",
        "worker-gpu-0": "0",
        "worker-gpu-3": "3",
    }
    queues = {name: words_after("--work-queue", plan.arguments) for name, plan in found.items()}
    assert queues == {"worker": ["cpu", "default"], "worker-gpu-0": ["gpu"], "worker-gpu-3": ["gpu"]}
    limits = {name: words_after("--limit", plan.arguments) for name, plan in found.items()}
    assert limits == {"worker": ["1"], "worker-gpu-0": ["2"], "worker-gpu-3": ["2"]}
    [shown] = words_after("--name", found["worker-gpu-3"].arguments)
    assert shown == f"{socket.gethostname()}-gpu-3-8090"
    [alone] = plans.workers(api, [], 1).values()
    assert "CUDA_VISIBLE_DEVICES" not in alone(8090).environment


def words_after(option: str, arguments: Sequence[str]) -> list[str]:
    return [word for before, word in pairwise(arguments) if before == option]


@pytest.mark.parametrize("seconds", [5.0, -5.0, 3600.0])
def test_a_clock_that_is_set_ends_no_service(seconds: float, capsys: pytest.CaptureFixture[str]) -> None:
    """A process's start in seconds since 1970 moves with the machine's clock."""
    services.up(prefect=False, mlflow=False, worker=False)
    [service] = background.recorded()
    background.record([replace(service, started=service.started - seconds)])
    assert services.status(as_json=True)
    services.up(prefect=False, mlflow=False, worker=False)
    assert [again.pid for again in background.recorded()] == [service.pid]
    assert "ended" not in capsys.readouterr().err


def test_prefect_asks_for_a_password_that_only_this_user_can_read(capsys: pytest.CaptureFixture[str]) -> None:
    """It is in one file and in what the processes are given, and in nothing that is shown, kept or seen by others."""
    os.umask(os.umask(0o000))
    password = background.password()
    assert background.PASSWORD.stat().st_mode & 0o777 == 0o600
    assert background.password() == background.known_password() == password and len(password) >= 16
    services.up(mlflow=False, dashboard=False, worker=False)
    services.status()
    services.status(as_json=True)
    shown = "".join(capsys.readouterr())
    assert str(background.PASSWORD) in shown and password not in shown
    assert password not in background.STATE.read_text()
    background.PASSWORD.chmod(0o644)
    changed = background.password()
    assert changed != password and background.PASSWORD.stat().st_mode & 0o777 == 0o600
    background.PASSWORD.write_text("")
    assert background.known_password() is None and len(background.password()) >= 16


def test_server_and_workers_are_given_the_password_and_not_as_an_argument(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    password = background.password()
    server = plans.prefect(4200)
    assert server.environment["PREFECT_SERVER_API_AUTH_STRING"] == password
    origins = server.environment["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"].split(",")
    assert set(origins) == {"http://127.0.0.1:4200", "http://localhost:4200"}
    workers = [plan(8090) for plan in plans.workers(server.url, ["0"], 1).values()]
    assert {worker.environment["PREFECT_API_AUTH_STRING"] for worker in workers} == {password}
    assert not [plan for plan in (server, *workers) if password in " ".join(plan.arguments)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name: mine\n",
        "deployments:\n",
        "deployments: []\n",
        "deployments: {a: 1}\n",
        "- a\n",
        "deployments: [1]\n",
        "deployments: [\n",
        "deployments: [{entrypoint: a.b}]\n",
        "\x00",
    ],
)
def test_deployments_that_are_none_are_refused_before_anything_starts(text: str) -> None:
    Path("infra").mkdir()
    (Path("infra") / "prefect.yaml").write_text(text)
    for command in (services.up, services.deploy):
        with pytest.raises(ConfigError, match=r"infra/prefect\.yaml"):
            command()
    assert background.recorded() == []


def test_deployments_that_are_no_text_are_refused() -> None:
    Path("infra").mkdir()
    (Path("infra") / "prefect.yaml").write_bytes(b"deployments: [{name: \xff}]")
    with pytest.raises(ConfigError, match=r"infra/prefect\.yaml"):
        services.up()
