"""From a parameter file and ``--set`` to a configuration: what wins, what is dropped, what is refused and how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flcore.config import Config
from flcore.errors import ConfigError
from pipelines.config.params import for_entry, load_config, override, read_params, with_plugins


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --------------------------------------------------------------------------------------------------------- files


def test_without_a_file_everything_is_default() -> None:
    assert load_config(None) == Config.from_mapping({})


def test_params_yaml_is_taken_where_there_is_one(empty_folder: Path) -> None:
    (empty_folder / "params.yaml").write_text("seed: 7\n")
    (empty_folder / "other.yaml").write_text("seed: 8\n")
    assert load_config(None).seed == 7
    assert load_config(Path("other.yaml")).seed == 8


def test_an_empty_file_is_no_error(empty_folder: Path) -> None:
    (empty_folder / "params.yaml").write_text("# nothing yet\n")
    assert read_params(None) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"given\.yaml: cannot be read \(No such file or directory\); name another file with --params"),
        (b"local: [1, 2", r"given\.yaml: not valid YAML: "),
        (b"\xff\xfe\x00", r"given\.yaml: not valid YAML: "),
        (b"- a\n- b\n", r"given\.yaml: expected sections such as 'data:' and 'method:', found list"),
    ],
)
def test_files_that_cannot_be_used(empty_folder: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (empty_folder / "given.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_params(Path("given.yaml"))
    assert "\n" not in str(caught.value)


def test_plug_ins_stand_relative_to_their_file_and_those_of_the_command_follow(empty_folder: Path) -> None:
    (empty_folder / "below").mkdir()
    (empty_folder / "below" / "given.yaml").write_text("plugins: [own.py, /elsewhere/other.py]\n")
    raw = read_params(Path("below/given.yaml"))
    own = [str(empty_folder / "below" / "own.py"), "/elsewhere/other.py"]
    assert raw == {"plugins": own}
    assert with_plugins(raw, [Path("more.py")]) == {"plugins": [*own, str(empty_folder / "more.py")]}
    assert with_plugins({"seed": 1}, []) == {"seed": 1}
    with pytest.raises(ConfigError, match=r"plugins = own\.py: expected a list of files"):
        with_plugins({"plugins": "own.py"}, [Path("more.py")])


def test_every_value_survives_being_written_and_read() -> None:
    config = load_config(None, ["method.name=fedprox", "method.mu=1e-05", "local.steps=3", "data.limit_per_class=5"])
    Path("params.yaml").write_text(yaml.safe_dump(config.to_mapping()))
    assert load_config(None) == config


# ----------------------------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("local.lr=0.5", 0.5),
        ("local.lr=1e-3", 0.001),
        ("local.lr = 0.5", 0.5),
        ("local.steps=null", None),
        ("local.steps=4", 4),
        ("local.schedule=cosine", "cosine"),
    ],
)
def test_values_are_read_as_yaml(assignment: str, value: Any) -> None:
    key = assignment.partition("=")[0].strip().removeprefix("local.")
    assert getattr(load_config(None, [assignment]).local, key) == value


def test_the_last_of_two_assignments_wins_and_the_file_loses() -> None:
    Path("params.yaml").write_text("local: {lr: 0.1, batch_size: 8}\n")
    local = load_config(None, ["local.lr=0.2", "local.lr=0.3"]).local
    assert (local.lr, local.batch_size) == (0.3, 8)


def test_a_section_that_is_empty_or_absent_can_be_set_into() -> None:
    assert override({"local": None}, ["local.lr=0.2", "seed=3"]) == {"local": {"lr": 0.2}, "seed": 3}
    assert override({}, ["compare.settings.fedprox={local.lr: 0.1}"]) == {
        "compare": {"settings": {"fedprox": {"local.lr": 0.1}}}
    }


def test_what_is_given_is_not_changed() -> None:
    raw = {"method": {"name": "fedprox", "mu": 0.1}}
    override(raw, ["method.name=fedavg", "method.mu=2"])
    assert raw == {"method": {"name": "fedprox", "mu": 0.1}}


@pytest.mark.parametrize(
    "assignments", [["method.name=fedproto", "method.weight=2"], ["method.weight=2", "method.name=fedproto"]]
)
def test_another_method_drops_the_earlier_ones_keys_whatever_the_order(assignments: list[str]) -> None:
    raw = {"method": {"name": "fedprox", "mu": 0.1}}
    assert override(raw, assignments) == {"method": {"name": "fedproto", "weight": 2}}


def test_the_same_name_drops_nothing() -> None:
    raw = {"method": {"name": "fedprox", "mu": 0.1}}
    assert override(raw, ["method.name=fedprox"]) == raw


def test_another_partitioner_keeps_the_sections_own_keys() -> None:
    """``num_clients`` belongs to every partition, ``alpha`` to the Dirichlet one."""
    raw = {"partition": {"name": "dirichlet", "alpha": 0.1, "num_clients": 4}}
    assert override(raw, ["partition.name=iid"]) == {"partition": {"name": "iid", "num_clients": 4}}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("local.lr", "--set local.lr: expected KEY=VALUE, such as --set local.lr=0.05"),
        ("=3", "--set =3: expected KEY=VALUE, such as --set local.lr=0.05"),
        ("local.lr=[1", "--set local.lr=[1: the value is not valid YAML"),
        ("locl.lr=1", "--set locl.lr: locl: unknown key; did you mean 'local'?"),
        ("seed.x=1", "--set seed.x: seed is a value, not a section"),
        ("local.lr.x=1", "--set local.lr.x: local.lr is a value, not a section"),
    ],
)
def test_assignments_that_lead_nowhere(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override({"seed": 1, "local": {"lr": 0.1}}, [assignment])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["local.batchsize=1"], "local.batchsize: unknown key; did you mean 'batch_size'?"),
        (["local.lr=0"], "local.lr = 0.0: must be > 0"),
        (["local.lr=fast"], "local.lr = fast: expected > 0"),
        (["local.epochs=1.5"], "local.epochs = 1.5: expected >= 1"),
        (["local.epochs=true"], "local.epochs = true: expected >= 1"),
        (["method.mu=1"], "method.mu: fedavg has no such parameter; it belongs to"),
        (["method.name=fedpro"], "method.name = fedpro: must be one of"),
        (["seed=-1"], "seed = -1: expected a whole number >= 0"),
        (["method=fedavg"], "method = fedavg: expected a section with keys, not a value"),
        (["evaluation.split=validation"], "evaluation.split = validation: needs partition.validation above 0"),
    ],
)
def test_values_that_cannot_be_run(assignments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, assignments)
    assert str(caught.value).startswith(message)


# ------------------------------------------------------------------------------------------- runs of a comparison


def test_a_comparisons_entry_has_its_own_settings() -> None:
    raw = {
        "local": {"lr": 0.1},
        "method": {"name": "fedprox", "mu": 0.5},
        "compare": {"settings": {"fedproto": {"local.lr": 0.2, "method.weight": 3.0}}},
    }
    Path("params.yaml").write_text(yaml.safe_dump(raw))
    fedproto = load_config(None, method="fedproto", seed=4)
    assert (fedproto.seed, fedproto.local.lr, fedproto.method.weight) == (4, 0.2, 3.0)  # type: ignore[attr-defined]
    fedprox = load_config(None, method="fedprox")
    assert (fedprox.seed, fedprox.local.lr, fedprox.method.mu) == (0, 0.1, 0.5)  # type: ignore[attr-defined]
    assert for_entry(raw, None, None) == raw


def test_an_entrys_settings_must_be_keys_with_values() -> None:
    with pytest.raises(ConfigError, match=r"compare\.settings\.fedproto = 3: expected dotted keys with values"):
        for_entry({"compare": {"settings": {"fedproto": 3}}}, "fedproto", None)
