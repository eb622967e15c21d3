"""``protofl completion bash``: a script that a shell reads, and what it offers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from flcore.methods import METHODS
from pipelines.cli.completion import script
from pipelines.cli.parser import make_parser


def offered(words: str, folder: Path) -> list[str]:
    """What bash offers for the last of the words."""
    typed = words.split(" ")
    (folder / "protofl.bash").write_text(script("bash", make_parser()))
    code = f"""
        source protofl.bash
        COMP_WORDS=({" ".join(repr(word) for word in typed)}) COMP_CWORD={len(typed) - 1}
        $(complete -p protofl | sed -E 's/.*-F ([^ ]+).*/\\1/') protofl
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    return sorted(line.strip() for line in done.stdout.splitlines() if line.strip())


@pytest.mark.skipif(shutil.which("bash") is None, reason="without bash")
def test_bash_is_offered_commands_options_choices_and_methods(tmp_path: Path) -> None:
    assert offered("protofl st", tmp_path) == ["stage", "status"]
    assert offered("protofl stage p", tmp_path) == ["partition", "prepare"]
    assert offered("protofl compare --se", tmp_path) == ["--seeds", "--set"]
    assert offered("protofl run --orchestrator in", tmp_path) == ["inline"]
    assert offered("protofl run --method fedpro", tmp_path) == [name for name in sorted(METHODS) if "fedpro" in name]
    (tmp_path / "folder").mkdir()
    assert offered("protofl run --out fol", tmp_path) == ["folder"]


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_scripts_too(shell: str) -> None:
    assert "protofl" in script(shell, make_parser())
