"""``protofl completion bash``: a script that a shell reads, and what it offers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flcore.methods import METHODS
from pipelines.cli.app import main


def offered(words: str, script: Path) -> list[str]:
    """What bash offers for the last of the words."""
    typed = words.split(" ")
    code = f"""
        source {script}
        COMP_WORDS=({" ".join(repr(word) for word in typed)}) COMP_CWORD={len(typed) - 1}
        $(complete -p protofl | sed -E 's/.*-F ([^ ]+).*/\\1/') protofl
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", code], cwd=script.parent, env=environment, capture_output=True, text=True, check=False
    )
    return sorted(line.strip() for line in done.stdout.splitlines() if line.strip())


@pytest.mark.skipif(shutil.which("bash") is None, reason="without bash")
def test_bash_is_offered_commands_options_choices_and_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "protofl.bash"
    script.write_text(capsys.readouterr().out)
    assert offered("protofl st", script) == ["stage", "status"]
    assert offered("protofl stage p", script) == ["paper", "partition", "prepare"]
    assert offered("protofl compare --se", script) == ["--seeds", "--set"]
    assert offered("protofl run --orchestrator in", script) == ["inline"]
    assert offered("protofl run --method fedpro", script) == [name for name in sorted(METHODS) if "fedpro" in name]
    (tmp_path / "folder").mkdir()
    assert offered("protofl run --out fol", script) == ["folder"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_scripts_too(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "protofl" in capsys.readouterr().out
