"""The same bytes on every processor with AVX2: kernels of libraries, square roots, and what is refused or told."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from flcore.core import portable
from flcore.core.errors import ConfigError
from flcore.core.host import python
from flcore.core.loaded_code import ROOT
from flcore.core.portable import square_root
from flcore.running import run

_WITHOUT = {name: value for name, value in os.environ.items() if name not in {*portable.SETTINGS, portable.VARIABLE}}
_QUESTION = "from flcore.core.cpu_class import is_portable, processor_class; print(processor_class(), is_portable())"

needs_avx2 = pytest.mark.skipif(not portable.has_avx2(), reason="no x86-64 processor with AVX2")


def answer(program: str, command: tuple[str, ...] = (), **environment: str) -> list[str]:
    """The last line that a new process prints, in words."""
    done = subprocess.run(
        [*command, *python("-c", program)],
        env=_WITHOUT | {"PYTHONPATH": str(ROOT.parent)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@needs_avx2
def test_libraries_compute_alike_if_flcore_comes_first() -> None:
    assert answer(f"import flcore; {_QUESTION}")[1] == "True"


@pytest.mark.slow
@needs_avx2
def test_it_is_known_when_a_variable_chose_other_kernels() -> None:
    name, is_portable = answer(f"import flcore; {_QUESTION}", ATEN_CPU_CAPABILITY="default")
    assert (name.split("-")[1], is_portable) == ("DEFAULT", "False")


@needs_avx2
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-user")
@pytest.mark.parametrize("processor", ["Haswell", "EPYC-Rome"])
def test_processors_of_two_makers_give_the_same_bytes(processor: str) -> None:
    """Emulated: the class, and methods with products, generators, decompositions, mixtures and square roots."""
    emulated = ("qemu-x86_64", "-cpu", processor)
    assert answer(f"import flcore; {_QUESTION}", emulated)[1] == "True"
    golden = "from pipelines.proof.golden import check; print(check(['fedavg', 'fedpa', 'gfpl', 'protolda']).lines[0])"
    assert answer(f"import flcore; {golden}", emulated)[:4] == ["golden:", "4", "of", "4"]


@needs_avx2
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-user")
@pytest.mark.parametrize("processor", ["Haswell", "EPYC-Rome"])
def test_compiled_stacks_give_the_same_bytes_on_processors_of_two_makers(processor: str, tmp_path: Path) -> None:
    """Emulated: programs that were compiled here, with other losses, a generator, and a server that calibrates."""
    program = (
        "import flcore; from pipelines.proof.golden import run_methods; "
        "print(list(run_methods(['fedavg', 'fedproto', 'fedpa', 'ccvr'], {'stack': True, 'compile': 'default'})))"
    )
    here = answer(program, XDG_CACHE_HOME=str(tmp_path))
    assert answer(program, ("qemu-x86_64", "-cpu", processor), XDG_CACHE_HOME=str(tmp_path)) == here


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_square_roots(dtype: type[np.floating]) -> None:
    """NumPy takes the exact instruction: equal in float32, within two last bits in float64."""
    generator = np.random.default_rng(0)
    usual = np.exp(generator.normal(0, 10, 100_000)).astype(dtype)
    special = np.array([0.0, np.finfo(dtype).tiny, 1.0, 4.0, np.finfo(dtype).max, np.inf], dtype=dtype)
    values = np.concatenate([usual, special])
    exact = np.sqrt(values)
    roots = square_root(torch.from_numpy(values)).numpy()
    assert roots.dtype == dtype
    if dtype is np.float32:
        assert np.array_equal(roots, exact)
    else:
        assert np.all(np.abs(roots[:-1] - exact[:-1]) <= 2 * np.spacing(exact[:-1]))
        assert np.isinf(roots[-1])
    assert torch.isnan(square_root(torch.tensor([-1.0], dtype=torch.from_numpy(values).dtype))).all()


def test_square_roots_have_gradients_in_stacks_too() -> None:
    """The derivative of √v at 4 is 1/4."""
    for dtype in (torch.float32, torch.float64):
        values = torch.tensor([[4.0], [4.0]], dtype=dtype)
        found = torch.func.vmap(torch.func.grad(lambda one: square_root(one).sum()))(values)
        assert torch.allclose(found, torch.full_like(found, 0.25))


@pytest.mark.parametrize(("configured", "started"), [("native", "portable"), ("portable", "native")])
def test_a_process_of_the_other_kind_is_refused(
    configured: str, started: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(portable.VARIABLE, started)
    with pytest.raises(ConfigError, match=f"engine.numerics = {configured}: .*{portable.VARIABLE}"):
        run({"engine": {"numerics": configured}}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@needs_avx2
def test_the_command_starts_itself_again_for_native_kernels(tmp_path: Path) -> None:
    """No setting is left in its environment, and the run says how it was computed."""
    small = ["data.limit_per_class=20", "partition.num_clients=2", "federation.rounds=1", "tracking.enabled=false"]
    options = [part for one in (*small, "engine.numerics=native") for part in ("--set", one)]
    command = python("-m", "pipelines.cli", "run", "--out", str(tmp_path / "run"), *options)
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=_WITHOUT | {"PYTHONPATH": str(ROOT.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"numerics": "native"' in (tmp_path / "run" / "config.json").read_text()
