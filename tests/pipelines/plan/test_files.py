"""Parameter files: which one is read, where its plug-ins lie, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from flcore.core.errors import ConfigError
from pipelines.plan.files import read_params, with_plugins


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_file_everything_is_default() -> None:
    assert read_params(None) == {}


def test_params_yaml_is_taken_where_there_is_one(empty_folder: Path) -> None:
    (empty_folder / "params.yaml").write_text("seed: 7\n")
    (empty_folder / "other.yaml").write_text("seed: 8\n")
    assert read_params(None) == {"seed": 7}
    assert read_params(Path("other.yaml")) == {"seed": 8}


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
