"""From a parameter file and ``--set`` to a configuration: what wins, what is dropped, what is refused and how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from pipelines.plan.files import read_params
from pipelines.plan.params import for_entry, override, variants_of, with_values, with_variants


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configured(*assignments: str, method: str | None = None, seed: int | None = None) -> Config:
    """What ``protofl run`` makes of ``params.yaml``, of ``--set``, ``--method`` and ``--seed``."""
    named = [] if method is None else [f"method.name={method}"]
    raw = override(override(read_params(None), named), assignments)
    return Config.from_mapping(for_entry(raw, method, seed))


def test_every_value_survives_being_written_and_read() -> None:
    config = configured("method.name=fedprox", "method.mu=1e-05", "local.steps=3", "data.limit_per_class=5")
    Path("params.yaml").write_text(yaml.safe_dump(config.to_mapping()))
    assert configured() == config


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
    assert getattr(configured(assignment).local, key) == value


def test_an_assignment_wins_over_the_file() -> None:
    Path("params.yaml").write_text("local: {lr: 0.1, batch_size: 8}\n")
    local = configured("local.lr=0.3").local
    assert (local.lr, local.batch_size) == (0.3, 8)


@pytest.mark.parametrize(
    "assignments",
    [
        ["local.lr=0.2", "local.lr=0.3"],
        ["method.name=fedprox", "method.name=fedavg"],
        ["local.lr=0.2", "local={batch_size: 8}"],  # the section would replace the key
        ["local={lr: 0.1}", "local.lr=0.2"],
        ["local={lr: 0.1}", "local={lr: 0.2}"],
        ["compare.settings.fedprox={local.lr: 0.1}", "compare.settings={}"],
    ],
)
def test_an_assignment_that_would_undo_another_is_refused(assignments: list[str]) -> None:
    keys = {assignment.partition("=")[0] for assignment in assignments}
    with pytest.raises(ConfigError) as caught:
        override({}, assignments)
    assert all(f"--set {key}" in str(caught.value) for key in keys)


@pytest.mark.parametrize(
    ("assignments", "result"),
    [
        (["local.lr=0.2", "local.lr=0.2"], {"lr": 0.2}),
        (["local={lr: 0.1}", "local.epochs=2"], {"lr": 0.1, "epochs": 2}),
        (["local.lr=0.1", "local={epochs: 2, lr: 0.1}"], {"lr": 0.1, "epochs": 2}),
        (["local.lr=0.1", "local.lr_decay=0.9"], {"lr": 0.1, "lr_decay": 0.9}),
        (["local=null", "local.lr=0.1"], {"lr": 0.1}),
    ],
)
def test_assignments_of_which_nothing_is_lost_are_taken(assignments: list[str], result: dict[str, Any]) -> None:
    assert override({}, assignments) == {"local": result}


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
        (["local.lr=0"], "local.lr = 0: must be > 0"),
        (["local.lr=fast"], "local.lr = fast: expected a number > 0"),
        (["local.epochs=1.5"], "local.epochs = 1.5: expected a whole number >= 1"),
        (["local.epochs=true"], "local.epochs = true: expected a whole number >= 1"),
        (["method.mu=1"], "method.mu: fedavg has no such parameter; it belongs to"),
        (["method.name=fedpro"], "method.name = fedpro: must be one of"),
        (["seed=-1"], "seed = -1: expected a whole number >= 0"),
        (["method=fedavg"], "method = fedavg: expected a section with keys, not a value"),
        (["evaluation.split=validation"], "evaluation.split = validation: needs partition.validation above 0"),
    ],
)
def test_values_that_cannot_be_run(assignments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(*assignments)
    assert str(caught.value).startswith(message)


def test_a_plain_sections_name_drops_nothing() -> None:
    """``engine`` has a ``name`` and no registry: its keys mean the same with either."""
    raw = {"engine": {"workers": 4, "device": "cpu"}}
    assert override(raw, ["engine.name=ray"]) == {"engine": {"name": "ray", "workers": 4, "device": "cpu"}}


def test_naming_the_default_that_was_meant_drops_nothing() -> None:
    raw = {"method": {"weighting": "uniform"}, "partition": {"alpha": 0.1}}
    same = override(raw, ["method.name=fedavg", "partition.name=dirichlet"])
    assert same == {
        "method": {"name": "fedavg", "weighting": "uniform"},
        "partition": {"name": "dirichlet", "alpha": 0.1},
    }


def test_values_by_key_are_assignments_that_need_no_yaml() -> None:
    raw = {"local": {"lr": 0.1}, "compare": {"settings": {"fedavg": {"local.lr": 0.5}}}}
    assert with_values(raw, {"local.lr": 0.2, "local.steps": None}) == raw | {"local": {"lr": 0.2, "steps": None}}
    with pytest.raises(ConfigError, match=r"^here: locl\.lr: locl: unknown key; did you mean 'local'"):
        with_values(raw, {"locl.lr": 1}, "here: ")


# ------------------------------------------------------------------------------------------------- settings of a method

FILE = """
local: {lr: 0.1}
method: {name: fedprox, mu: 0.5}
compare: {settings: {fedproto: {local.lr: 0.2, method.weight: 3.0}, fedprox: {local.lr: 0.4}}}
"""


def rate_and_seed(*assignments: str, **entry: Any) -> tuple[float, int]:
    Path("params.yaml").write_text(FILE)
    config = configured(*assignments, **entry)
    return config.local.lr, config.seed


@pytest.mark.parametrize(
    ("assignments", "entry", "expected"),
    [
        ([], {}, (0.4, 0)),
        ([], {"method": "fedprox", "seed": 4}, (0.4, 4)),
        (["method.name=fedprox"], {}, (0.4, 0)),
        ([], {"method": "fedproto"}, (0.2, 0)),
        (["method.name=fedproto"], {}, (0.2, 0)),
        (["method.name=fedproto"], {"method": "moon", "seed": 1}, (0.1, 1)),
        (["local.lr=0.9"], {"method": "fedproto"}, (0.9, 0)),
        (["method.name=fedproto", "local.lr=0.9"], {}, (0.9, 0)),
        (["local={lr: 0.9}"], {}, (0.9, 0)),
    ],
)
def test_settings_of_a_method_hold_however_it_was_chosen_and_the_command_line_wins(
    assignments: list[str], entry: dict[str, Any], expected: tuple[float, int]
) -> None:
    assert rate_and_seed(*assignments, **entry) == expected


def test_values_that_go_with_a_method_are_that_methods() -> None:
    """--method fedprox --set method.mu=0.5 over a file of another method; the file's own values are dropped."""
    Path("params.yaml").write_text("method: {name: moon, tau: 0.7}\n")
    found = configured("method.mu=0.5", method="fedprox").method
    assert (found.name, found.mu) == ("fedprox", 0.5)  # type: ignore[attr-defined]
    # What the file's method does not have was given for another one, or is a mistake that is told.
    raw = override({"method": {"name": "fedntd", "tau": 0.7}}, ["method.mu=0.5"])
    assert for_entry(raw, "fedprox", 0)["method"] == {"name": "fedprox", "mu": 0.5}
    with pytest.raises(ConfigError, match=r"^method\.nu: unknown key; allowed here: mu, name"):
        Config.from_mapping(for_entry(override(raw, ["method.nu=0.5"]), "fedprox", 0))


def test_a_model_that_settings_bring_takes_what_is_given_for_it() -> None:
    """--set model.atoms=7 over a file whose compare.settings say which model the method has."""
    settings = {"protolda": {"model.name": "patch_dictionary"}}
    file = {"model": {"name": "fedgen_cnn", "feature_dim": 16}, "compare": {"settings": settings}}
    found = for_entry(override(file, ["model.atoms=7"]), "protolda", 0)
    assert found["model"] == {"name": "patch_dictionary", "atoms": 7}


def test_settings_concern_their_method_alone() -> None:
    raw = yaml.safe_load(FILE)
    assert for_entry(raw, "fedproto", None)["method"] == {"name": "fedproto", "weight": 3.0}
    assert for_entry(raw, None, None) == raw | {"local": {"lr": 0.4}}
    assert for_entry({}, None, None) == {}
    assert raw == yaml.safe_load(FILE)
    settings = override(raw, ["local.lr=1"])["compare"]["settings"]
    assert settings == {"fedproto": {"method.weight": 3.0}, "fedprox": {}}


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (3, "compare.settings.fedproto = 3: expected dotted keys with values, such as local.lr: 0.05"),
        ({"local": {"lr": 1}}, "compare.settings.fedproto: local = {'lr': 1}: expected dotted keys with values"),
        ({"method.name": "moon"}, "compare.settings.fedproto: method.name is said by the entry itself"),
        ({"seed": 1}, "compare.settings.fedproto: seed is said by the entry itself"),
        ({"locl.lr": 1}, "compare.settings.fedproto: locl.lr: locl: unknown key; did you mean 'local'?"),
    ],
)
def test_settings_must_be_dotted_keys_with_values(own: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        for_entry({"compare": {"settings": {"fedproto": own}}}, "fedproto", None)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("section", ["fedavg", 3, {"name": ["a"]}, {"name": None}])
def test_what_cannot_be_a_method_is_refused_by_the_configuration(section: object) -> None:
    with pytest.raises(ConfigError, match=r"^method(\.name)? = "):
        Config.from_mapping(for_entry({"method": section}, None, None))


# ---- variants ----------------------------------------------------------------------------------------------------


def test_a_variant_is_a_method_with_values_of_its_own_that_win() -> None:
    raw = {
        "method": {"name": "fedprox", "mu": 0.5},
        "local": {"lr": 0.1},
        "compare": {"settings": {"fedavg": {"local.lr": 0.2, "local.epochs": 2}}},
    }
    named = with_variants(raw, ["slow=fedavg,local.lr=0.001", "strong=fedprox,method.mu=1,model.batchnorm=local"])
    slow, strong = (for_entry(named, entry, 3) for entry in ("slow", "strong"))
    assert (slow["method"], slow["local"], slow["seed"]) == ({"name": "fedavg"}, {"lr": 0.001, "epochs": 2}, 3)
    assert (strong["method"], strong["local"]["lr"]) == ({"name": "fedprox", "mu": 1}, 0.1)
    assert for_entry(named, "fedavg", None, 7)["partition"] == {"seed": 7}
    assert "variants" not in raw["compare"]  # what is given is not changed
    checked = Config.from_mapping(named).compare
    assert list(checked.variants) == ["slow", "strong"]


@pytest.mark.parametrize("text", ["slow", "slow=", "=fedavg", "slow=local.lr=0.1", "slow=fedavg,local.lr"])
def test_a_variant_has_a_name_a_method_and_values(text: str) -> None:
    with pytest.raises(ConfigError, match="variant"):
        Config.from_mapping(with_variants({}, [text]))


@pytest.mark.parametrize(
    "texts",
    [["a=fedavg,local.lr=0.1", "a=fedavg,local.lr=0.2"], ["a=fedavg", "a=fedprox"], ["a=fedavg,local.lr=1,local.lr=2"]],
)
def test_a_variant_that_is_given_twice_is_refused(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match="--variant a"):
        override({}, [], variants_of(texts))


def test_values_of_a_variant_may_have_commas() -> None:
    named = with_variants({}, ["two=fedavg,evaluation.analyses=[tsne, skew],local.lr=0.1"])
    own = {"method": "fedavg", "evaluation.analyses": ["tsne", "skew"], "local.lr": 0.1}
    assert named["compare"]["variants"]["two"] == own


def test_a_variant_that_is_called_as_its_method_is_that_methods_row_alone() -> None:
    """Settings of a method are of all its rows; what its own row sets, others do not have."""
    variants = {"fedprox": {"method": "fedprox", "method.mu": 0.3}, "short": {"method": "fedprox", "local.epochs": 2}}
    raw = {"compare": {"methods": ["fedprox", "short"], "baseline": "short", "variants": variants}}
    Config.from_mapping(raw)
    rows = [Config.from_mapping(for_entry(raw, row, 0)).to_mapping() for row in ("fedprox", "short")]
    plain = Config.from_mapping({"method": {"name": "fedprox"}}).to_mapping()
    assert [row["method"]["mu"] for row in rows] == [0.3, plain["method"]["mu"]] != [0.3, 0.3]
    assert [row["local"]["epochs"] for row in rows] == [plain["local"]["epochs"], 2]


@pytest.mark.parametrize(
    ("compare", "message"),
    [
        ({"variants": {"fedavg": {"method": "fedprox"}}}, r"compare\.variants\.fedavg: is the name of another method"),
        ({"variants": {"slow": {"method": "fedovg"}}}, r"compare\.variants\.slow: expected a method and dotted keys"),
        ({"variants": {"slow": 3}}, r"compare\.variants\.slow: expected a method and dotted keys"),
        ({"methods": ["slow"]}, "compare.methods: slow: unknown method"),
        ({"partition_seeds": [1, 1]}, r"compare\.partition_seeds = \[1, 1\]: a seed appears twice"),
    ],
)
def test_what_cannot_be_a_variant(compare: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_mapping({"compare": compare})
    with pytest.raises(ConfigError, match=r"compare\.variants\.slow: seed is said by the entry itself"):
        for_entry({"compare": {"variants": {"slow": {"method": "fedavg", "seed": 3}}}}, "slow", 0)
