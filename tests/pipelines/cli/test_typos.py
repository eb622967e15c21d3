"""A mistyped key is refused before torch is imported, in the words of the configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flcore.config.schema import REGISTRIES, Config
from flcore.core.errors import ConfigError
from flcore.core.params import declared
from pipelines.cli.headlines import places
from pipelines.cli.typos import _LISTED, declared_by, refuse_typos
from pipelines.plan.params import for_entry


@pytest.mark.parametrize(
    "raw",
    [
        {"federaton": {}},
        {"federation": {"raunds": 3}},
        {"federation": {"rounds": 0}},
        {"federation": {"sampler": ["uniform"]}},
        {"method": {"name": "fedavgg"}},
        {"method": {"name": "fedprox", "muu": 1}},
        {"method": {"name": "gfpl", "merge_distence": 1}},
        {"partition": {"alhpa": 1}},
        {"partition": {"num_client": 1}},
        {"data": {"limit_per_clas": 1}},
        {"model": {"feature_dm": 1}},
        {"compare": {"settings": {"fedprox": {"local.lrr": 1}}}},
        {"compare": {"variants": {"mine": {"method": "fedprox", "method.muu": 1}}}},
    ],
    ids=lambda raw: "-".join(str(value) for value in raw.values())[:40],
)
def test_a_typo_is_refused_as_the_configuration_refuses_it(raw: dict[str, Any]) -> None:
    """Of an entry's keys the configuration lists what is allowed; all else is the same text."""
    with pytest.raises(ConfigError) as at_once:
        refuse_typos(raw)
    rows = raw.get("compare", {})
    row = next(iter(rows.get("settings") or rows.get("variants") or [None]))
    with pytest.raises(ConfigError) as later:
        Config.from_mapping(for_entry(raw, row, None))
    assert str(later.value).startswith(str(at_once.value).removesuffix("?"))


def test_what_a_configuration_takes_or_tells_better_is_left_to_it() -> None:
    """A key of another method, a class of one's own, names and keys of plug-ins, and what is no section."""
    refuse_typos({"method": {"name": "fedavg", "mu": 1}, "model": {"name": "mine:Net", "depht": 2}, "local": None})
    refuse_typos({"plugins": ["mine.py"], "method": {"name": "mine", "zeta": 1}, "data": 3})
    refuse_typos({"plugins": ["mine.py"], "compare": {"settings": {"mine": {"method.zeta": 1}}}})
    refuse_typos(Config().to_mapping())


@pytest.mark.parametrize(("section", "name"), [(s, name) for s, kind in _LISTED.items() for name in places(kind)])
def test_no_key_of_an_entry_is_taken_for_a_typo(section: str, name: str) -> None:
    """Its parameters are found in the sources, however they are declared."""
    parameters = {parameter.name for parameter in declared(REGISTRIES[section][name])}
    assert parameters <= declared_by(places(_LISTED[section])[name])


def test_torch_is_not_imported_for_a_typo(tmp_path: Path) -> None:
    program = (
        "import sys; from pipelines.cli.app import main; code = main(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    )
    for words in (["run", "--method", "fedprox", "--set", "method.muu=3"], ["compare", "--set", "federation.raunds=3"]):
        command = [sys.executable, "-P", "-c", program, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.stdout.split() == ["2", "False"], done.stderr
        assert not any(tmp_path.iterdir())
