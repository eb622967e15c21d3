"""Plain words of YAML: read as DVC and editors read them, or as text where readers disagree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dvc.utils.serialize import parse_yaml
from hypothesis import given
from hypothesis import strategies as st

from flcore.config.schema import Config
from flcore.core.errors import ConfigError
from pipelines.plan import yaml_text
from pipelines.plan.files import read_params
from pipelines.plan.params import for_entry, override

READ: dict[str, Any] = {
    "1e-3": 0.001,
    "1E5": 100000.0,
    "2.5e2": 250.0,
    "1.": 1.0,
    ".5": 0.5,
    "-0": 0,
    "+7": 7,
    "0x1F": 31,
    "10": 10,
    "true": True,
    "FALSE": False,
    "~": None,
    "": None,
    "-.inf": float("-inf"),
    "y": "y",
    "n": "n",
    "20_face": "20_face",
    "127.0.0.1": "127.0.0.1",
    "1:99": "1:99",
    "inf": "inf",
    "'010'": "010",
    '"yes"': "yes",
    "!!str 1_000": "1_000",
}
DISPUTED = ["010", "-08", "0o17", "0b11", "1_000", "1_0.5", "0x_f", "1:30", "1:30:00", "-1:30.5", "2026-11-30",
           "2026-11-30 10:00:00", "yes", "No", "ON", "off"]  # fmt: skip


@pytest.mark.parametrize("text", READ)
def test_plain_words_are_read_as_by_yaml_1_2_and_by_dvc(text: str) -> None:
    found = yaml_text.parse(f"a: {text}")["a"]
    assert (type(found), found) == (type(READ[text]), READ[text])
    by_dvc = parse_yaml(f"a: {text}", "params.yaml")["a"]
    assert (type(by_dvc), by_dvc) == (type(found), found)


@pytest.mark.parametrize("text", DISPUTED)
def test_what_readers_of_yaml_disagree_about_is_text(text: str) -> None:
    assert yaml_text.parse(f"a: {text}") == {"a": text}


@given(
    st.one_of(
        st.text("0123456789+-._:eExob", max_size=7),
        st.from_regex(r"[-+]?[0-9]{1,3}[._:eE][-+]?[0-9]{1,3}", fullmatch=True),
    )
)
def test_a_number_that_is_read_is_the_same_to_dvc(text: str) -> None:
    """Or it is text to one of them, never another number."""
    try:
        found = yaml_text.parse(f"[{text}]")
        by_dvc = parse_yaml(f"[{text}]", "params.yaml")
    except Exception:
        return
    numbers = [
        isinstance(value, list) and all(isinstance(item, int | float) for item in value) for value in (found, by_dvc)
    ]
    if all(numbers):
        assert found == by_dvc


def test_text_in_place_of_a_number_is_refused(tmp_path: Path) -> None:
    for text in ("010", "1:30", "1_000", "yes"):
        (tmp_path / "params.yaml").write_text(f"seed: 0\nfederation:\n  rounds: {text}\n")
        for raw in (read_params(tmp_path / "params.yaml"), override({}, [f"federation.rounds={text}"])):
            with pytest.raises(ConfigError, match=f"federation.rounds = .*{text}.*: expected a whole number"):
                Config.from_mapping(raw)


@given(st.recursive(st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.floats(allow_nan=False),
                              st.sampled_from([*DISPUTED, *map(str, READ)]), st.text("abc019.-_:~ '\"#")),
                    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text("ab01:"), inner))))  # fmt: skip
def test_what_is_written_is_read_as_the_same(value: Any) -> None:
    assert yaml_text.parse(yaml_text.write({"a": value})) == {"a": value}


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ('federation.rounds="3"', ("federation.rounds", '"3"', "quotes", "whole number")),
        ('local.lr="1_0"', ("local.lr", "1_0", "number")),
        ("tracking.enabled='true'", ("tracking.enabled", '"true"', "quotes")),
        ("compare.seeds=['1']", ("compare.seeds", "whole numbers")),
        ("local.lr=inf", ("local.lr", "inf", "number")),
        ("local.lr=.inf", ("local.lr", "inf", "finite", "> 0")),
        ("local.lr=.nan", ("local.lr", "nan", "finite", "> 0")),
        ("local.lr=1e999", ("local.lr", "inf", "finite")),
        ("data.std=[.inf, 1, 1]", ("data.std", "inf", "finite")),
        ("compare.settings={fedprox: {local.lr: .inf}}", ("compare.settings", "finite numbers")),
        ("federation.rounds=.inf", ("federation.rounds", "inf", "whole number")),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_its_key_and_what_is_allowed(
    assignment: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(for_entry(override({}, [assignment]), None, None))
    assert all(word in str(caught.value) for word in words), str(caught.value)
