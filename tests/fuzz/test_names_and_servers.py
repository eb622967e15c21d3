"""Names that lead out of a folder, files that somebody sends, and who may ask a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flcore.config.plugins import load
from flcore.config.schema import Config
from flcore.core.errors import ConfigError, DataError
from flcore.experiment.run_folder import stored_mapping
from flcore.io.files import sealed, write_json
from pipelines.orchestration import plans
from pipelines.runs.cache import Cache
from pipelines.tracking.artifacts import comparison_files, small_files
from pipelines.tracking.store import Store
from pipelines.tuning import dashboard

PLUGIN = """\
from dataclasses import dataclass
from typing import ClassVar
from flcore.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    name: ClassVar[str] = {name!r}
    summary: ClassVar[str] = "mine"
    citation: ClassVar[str] = "none"
"""


@pytest.mark.parametrize("name", ["../mine", "/mine", "mi/ne", "..", "Mine", "mi ne", "mi\x00ne", ""])
def test_a_method_whose_name_is_a_path_is_refused(name: str, tmp_path: Path) -> None:
    """Runs are called after their methods."""
    (tmp_path / "mine.py").write_text(PLUGIN.format(name=name))
    with pytest.raises(ConfigError, match=r"a name is made of|has no name of its own|null bytes"):
        load(tmp_path / "mine.py")


def test_the_index_of_the_cache_leads_nowhere_else(tmp_path: Path) -> None:
    cache, config = Cache(tmp_path / "cache"), Config.from_mapping({"data": {"limit_per_class": 2}})
    place = cache.prepared(config)
    (entry,) = (tmp_path / "cache" / "index" / "prepared").glob("*.json")
    known = json.loads(entry.read_text())
    (tmp_path / "outside").mkdir()
    for fingerprint in ("../../outside", str(tmp_path / "outside"), "", 7, None):
        write_json(entry, {**known, "fingerprint": fingerprint})
        assert cache.prepared(config) == place
    assert list((tmp_path / "outside").iterdir()) == []


@pytest.mark.parametrize("path", ["../mine.py", "/tmp/mine.py", "plugins/../../mine.py", "mine.py", 3, None])
def test_a_run_that_somebody_sends_names_no_code_elsewhere(path: object, tmp_path: Path) -> None:
    config = {"data": {}, "partition": {}, "plugins": [{"path": path, "sha256": "0" * 64}]}
    write_json(tmp_path / "config.json", sealed({"config": config, "identity": {}, "config_hash": "0"}))
    with pytest.raises(DataError, match="names a plug-in that is not in its folder"):
        stored_mapping(tmp_path)


def test_links_in_a_run_that_somebody_sends_are_not_published(tmp_path: Path) -> None:
    (tmp_path / "private").write_text("mine")
    run = tmp_path / "run"
    (run / "figures").mkdir(parents=True)
    (run / "metrics.json").write_text("{}")
    (run / "figures" / "a.csv").symlink_to(tmp_path / "private")
    (run / "table.csv").symlink_to(tmp_path / "private")
    (run / "also.json").symlink_to(run / "metrics.json")
    assert [path.name for path in small_files(run)] == ["also.json", "metrics.json"]
    assert [path.name for path in comparison_files(run)] == ["also.json", "metrics.json"]


@pytest.mark.parametrize("name", ["../../outside/iid", "digits/../../../outside", "/outside"])
def test_an_experiment_has_its_artifacts_in_the_store(name: str, tmp_path: Path) -> None:
    """The name is data and partition, as the config.json of a run says that perhaps somebody sent."""

    class Client:
        def get_experiment_by_name(self, name: str) -> None:
            return None

    with pytest.raises(DataError, match="leads out of the store"):
        Store(f"sqlite:///{tmp_path / 'mlflow.db'}").experiment_id(Client(), name)  # type: ignore[arg-type]


def test_servers_listen_to_this_machine_alone_and_check_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words with which they are started: on loopback, and MLflow with its checks of hosts and origins."""
    monkeypatch.chdir(tmp_path)
    started = [plans.prefect(1), plans.mlflow(2, "sqlite:///a.db"), plans.dashboard(3)]
    started += [plan(4) for plan in plans.workers("http://127.0.0.1:1/api", ["0"], 1).values()]
    for plan in started:
        words = [*plan.arguments, *plan.environment.values()]
        assert plan.url.startswith("http://127.0.0.1:")
        assert not [word for word in words if "0.0.0.0" in word or word in ("*", "::", "--expose-app")]
        assert not [
            word
            for word in (*words, *plan.environment)
            if "security" in word.lower() or ("allowed" in word.lower() and "CORS" not in word)
        ]
    modules = [plan.arguments[plan.arguments.index("-m") + 1] for plan in started[:3]]  # which have the check
    assert modules == ["pipelines.orchestration.serving"] * 2 + ["pipelines.tuning.dashboard"]
    assert [plan.environment.get("PREFECT_WORKER_WEBSERVER_HOST") for plan in started[3:]] == ["127.0.0.1"] * 2
    asked: list[str] = []

    def run(app: Any, host: str, port: int) -> None:
        said: list[str] = []
        app({"HTTP_HOST": "evil.example"}, lambda status, _: said.append(status))
        asked.extend([host, *said])

    monkeypatch.setattr("bottle.run", run)
    monkeypatch.setattr("sys.argv", ["dashboard", "--port", "3"])
    dashboard.main()
    assert asked == ["127.0.0.1", "403 Forbidden"]
