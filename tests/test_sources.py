"""What every source of the packages keeps to. Each file is parsed once, and all rules read its nodes."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import flcore

ROOT = Path(flcore.__file__).parents[1]
Nodes = Sequence[ast.AST]


def nodes_of(source: bytes | str) -> Nodes:
    return list(ast.walk(ast.parse(source)))


@cache
def found() -> dict[str, list[str]]:
    """What each rule finds, as ``path: finding``."""
    findings = defaultdict(list)
    for path in sorted([*(ROOT / "flcore").rglob("*.py"), *(ROOT / "pipelines").rglob("*.py")]):
        name, nodes = path.relative_to(ROOT).as_posix(), nodes_of(path.read_bytes())
        for rule, of in RULES.items():
            findings[rule] += [f"{name}: {finding}" for finding in of(nodes)]
    return findings


UNPICKLES = {"pickle", "cPickle", "shelve", "marshal", "dill", "cloudpickle", "joblib"}
FORBIDDEN = {
    *("torch.load", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "eval", "exec"),
}


def dangers(nodes: Nodes) -> Iterator[str]:
    """What reads pickles, runs text as code, or hands a command to a shell."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in UNPICKLES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from sorted(names & FORBIDDEN)
            if node.module.partition(".")[0] in UNPICKLES:
                yield node.module
            if "torchvision.datasets" in {*names, node.module}:
                yield "torchvision.datasets"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
            if name in FORBIDDEN:
                yield name
            for keyword in node.keywords:
                is_on = not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
                is_shell = keyword.arg == "shell" and name.startswith(("subprocess.", "Popen"))
                if is_on and (is_shell or keyword.arg == "allow_pickle"):
                    yield f"{name}({keyword.arg}=...)"


def test_nothing_is_unpickled_evaluated_or_handed_to_a_shell() -> None:
    assert set(found()["dangers"]) == {
        "flcore/config/plugins.py: exec",  # a person's own methods, in a file that they name
        # The official files of CIFAR, which torchvision unpickles once their published check sums are right.
        "flcore/data/sources/cifar.py: torchvision.datasets",
        "flcore/data/sources/mnist.py: torchvision.datasets",  # fetches files in IDX, which are read here
    }


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from joblib import load", "import torch\ntorch.load(path)", "import yaml\nyaml.load(text)"),
        *(
            "import numpy as np\nnp.load(path, allow_pickle=True)",
            "from os import system",
            "import os\nos.system(text)",
        ),
        *("import subprocess\nsubprocess.run(text, shell=True)", "eval(text)", "from torchvision import datasets"),
    ],
)
def test_each_of_these_would_be_seen(source: str) -> None:
    assert list(dangers(nodes_of(source)))
    harmless = "model.eval()\nnp.load(path, allow_pickle=False)\nsubprocess.run(words, shell=False)\nyaml.safe_load(x)"
    assert list(dangers(nodes_of(harmless))) == []


CHANGES = {
    "write_text", "write_bytes", "unlink", "rmdir", "mkdir", "makedirs", "touch", "symlink_to", "hardlink_to", "rmtree",
    "copyfile", "copytree", "copy2", "fsync", "truncate", "mkstemp", "mkdtemp", "TemporaryDirectory",
    "NamedTemporaryFile", "save_file",
}  # fmt: skip
"""Names of functions that change what is on a disk, whoever has them."""
BY_OWNER = {"os": {"link", "symlink", "remove", "replace", "open"}, "shutil": {"move"}}
"""Those that mean so only there."""
TO_A_BUFFER = {"np": {"save", "savez"}, "torch": {"save"}}
"""Those that may be given a buffer, which is called ``content``."""
OURS = {"write_text"}
"""Those that are called so here and go through :mod:`flcore.io.disk`."""
PAST_THE_DISK = {
    "flcore/engine/local/compiler.py": "a few lines that the compiler is tried with",
    "flcore/engine/pool/ray.py": "the folder of a worker on another node, which lives no longer than the worker",
    "flcore/testing/__init__.py": "runs of a moment, in a folder that is thrown away",
    "flcore/testing/trial.py": "who holds what in them",
    "pipelines/cli/new_project.py": "folders of a new project; its files go through the disk",
    "pipelines/execution/follower.py": "a log",
    "pipelines/orchestration/background.py": "logs of servers",
    "pipelines/runs/memory.py": "a question to the kernel",
    "pipelines/tracking/model.py": "a folder from which MLflow copies a model",
    "pipelines/proof/stored_zip.py": "entries of a file that replaces another in one step",
    "pipelines/proof/golden.py": "runs of a moment, in a folder that is thrown away",
    "pipelines/runs/standard_error.py": "output that nobody reads any more",
}
"""Who changes something by other means, and what; nothing of it is a result."""


def past_the_disk(nodes: Nodes) -> list[str]:
    """Calls that change what is on a disk, as written there, but for those of :mod:`flcore.io.disk`."""
    return [ast.unparse(call) for call in nodes if isinstance(call, ast.Call) and changes(call)]


def changes(call: ast.Call) -> bool:
    """Whether a call changes what is on a disk, as far as names tell."""
    named = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    owned = owner.id if isinstance(owner, ast.Name) else ""
    if owned in ("disk", "self", "cls") or isinstance(owner, ast.Constant) or (owner is None and named in OURS):
        return False
    if named in TO_A_BUFFER.get(owned, ()):
        return ast.unparse(call.args[0]) != "content"
    if named in BY_OWNER.get(owned, ()):
        return True
    if named == "to_csv":
        return bool(call.args)
    if named in ("replace", "rename"):  # a path takes one argument, a text two, dataclasses and tables names
        return owner is not None and len(call.args) == 1 and not call.keywords
    if named == "open":
        modes = call.args[0 if owner is not None else 1 :]
        modes = [*modes, *(word.value for word in call.keywords if word.arg == "mode")]
        return any(isinstance(mode, ast.Constant) and is_for_writing(str(mode.value)) for mode in modes)
    return named in CHANGES


def is_for_writing(mode: str) -> bool:
    """Whether a text is a mode in which a file is opened to be written."""
    return set(mode) <= set("rwaxbt+") and bool(set(mode) & set("wax+"))


def test_changes_of_the_disk_are_seen() -> None:
    """Each way to change a file, and what only looks like one."""
    seen = ["path.write_text(x)", "open(x, 'w')", "path.open('ab')", "path.open(mode='x')", "os.replace(a, b)",
            "one.replace(other)", "shutil.rmtree(x)", "(a / b).unlink()", "np.savez(path, x=1)", "mkdtemp()",
            "table.to_csv(path)", "os.remove(x)", "Path(x).mkdir()"]  # fmt: skip
    assert [past_the_disk(nodes_of(text)) for text in seen] == [[text] for text in seen]
    unseen = ["path.open()", "path.open('rb')", "zip.open('name')", "text.replace('a', 'b')", "replace(run, label='a')",
              "dataclasses.replace(a, b=1)", "disk.rename(a, b)", "METHODS.remove(a)", "np.savez(content, x=1)",
              "table.to_csv(index=False)", "' '.replace(a)", "division.save(directory)"]  # fmt: skip
    assert [past_the_disk(nodes_of(text)) for text in unseen] == [[] for _ in unseen]


def test_what_changes_on_the_disk_goes_through_one_file() -> None:
    """Else `tests/crash` does not count it, and nobody knows what a kill there leaves."""
    files = {line.partition(": ")[0] for line in found()["disk"]} - {"flcore/io/disk.py"}
    assert files == PAST_THE_DISK.keys(), "something new, or no longer an exception"


_ADVICE = re.compile(r"(^|\s)--[a-z]{3,}|\bthe (prepare|partition|train) stage")


def advice(nodes: Nodes) -> Iterator[str]:
    """Texts, docstrings aside, that name options or stages of the command."""
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    yield from (f"line {text.lineno}" for text in texts if id(text) not in alone and _ADVICE.search(text.value))


def test_no_message_of_the_library_advises_options_or_stages_of_a_command() -> None:
    """What it says of errors is said to a caller in Python."""
    assert [line for line in found()["advice"] if line.startswith("flcore/")] == []


def square_roots(nodes: Nodes) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("sqrt", "sqrt_", "_foreach_sqrt"):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            yield from [f"line {node.lineno}"] * (owner not in ("math", "np"))


def test_no_other_square_root_of_tensors_is_in_use() -> None:
    """MKL's gives other last bits on other processors; Python's and NumPy's are exact."""
    files = {line.partition(": ")[0] for line in found()["roots"] if line.startswith("flcore/")}
    assert files == {"flcore/core/portable.py"}


SEVEN = {"torch", "torchvision", "numpy", "sklearn", "scipy", "safetensors", "pydantic"}
ALLOWED = SEVEN | {"flcore", "PIL", "threadpoolctl", "typing_extensions", "filelock"}  # requirements of the seven


def packages(nodes: Nodes) -> Iterable[str]:
    """What is imported, also inside functions, but for the standard library."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "flcore").partition(".")[0]


def test_no_file_of_the_library_imports_another_package() -> None:
    """Some are imported inside functions, and only when somebody asks for what they do."""
    others = {line for line in found()["packages"] if line.startswith("flcore/") and line.split(": ")[1] not in ALLOWED}
    assert others == {
        "flcore/data/sources/huggingface.py: pyarrow",
        "flcore/engine/pool/ray.py: ray",
        "flcore/math/prototypes/release.py: dp_accounting",
        "flcore/aggregation/account.py: dp_accounting",
    }


RULES: dict[str, Callable[[Nodes], Iterable[str]]] = {
    "dangers": dangers,
    "disk": past_the_disk,
    "advice": advice,
    "roots": square_roots,
    "packages": lambda nodes: {name for name in packages(nodes) if name not in sys.stdlib_module_names},
}
