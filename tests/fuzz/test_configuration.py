"""Configurations that nobody would write, through the command's own entry point, and such as anybody might.

Whatever is typed: an exit code that is documented, a message of a few lines, and nothing on the disk but in the folders
that were named. Thirty cases belong to the default suite; ``make fuzz`` runs two thousand.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from flcore import run
from flcore.config.schema import REGISTRIES, Config
from flcore.config.sections import PLAIN, SHARED
from flcore.core.errors import ProtoflError
from flcore.core.params import Param, declared
from pipelines.cli.app import main
from tests.cases import quick

TINY = {
    "data.name": "digits",
    "data.limit_per_class": 4,
    "partition.num_clients": 2,
    "federation.rounds": 1,
    "local.epochs": 1,
    "local.steps": 1,
    "engine.workers": 0,
    "engine.name": "local",
    "engine.compile": "none",
    "tracking.enabled": "false",
}
"""What keeps a configuration that can be run from taking long."""

COUNTS = [30, pytest.param(1800, marks=pytest.mark.slow)]
TRAINED = [2, pytest.param(200, marks=pytest.mark.slow)]
"""Cases that combine allowed values, and are trained if they are accepted."""

_MOST_LINES, _LONGEST = 6, 2100


_OWN = {
    section: {param.name: param for entry in registry.values() for param in declared(entry)}
    for section, registry in REGISTRIES.items()
}
_DECLARED: dict[str, Param | None] = {
    **{f"{section}.{name}": param for section, params in _OWN.items() for name, param in params.items()},
    **{
        f"{section}.{param.name}": param
        for section, cls in {**SHARED, **PLAIN}.items()
        if cls is not None
        for param in declared(cls)
    },
    **{f"{section}.name": None for section in REGISTRIES},
    "seed": None,
    "plugins": None,
}
_NUMBERS = st.one_of(
    st.integers(-3, 12),
    st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400, 0]),
    st.floats(),
    st.sampled_from([1e-320, 1e308, -0.0]),
)
_WORDS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", " ", "../../outside/x", "/dev/null", "~nobody-there/x", "\x00", "\x1b[31m", "a\nb", "\ud800"]),
    st.sampled_from(
        ["fedavg", "moon", "dirichlet", "iid", "digits", "null", "true", "1e-3", ".nan", "{date}", "x" * 5000]
    ),
)
_JUNK = st.recursive(
    st.one_of(_NUMBERS, _WORDS, st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_WORDS, inner, max_size=3)),
    max_leaves=6,
)
_SNIPPETS = st.sampled_from(
    [
        "!!python/object/apply:os.system ['touch ../outside/x']",
        "!!python/name:os.system",
        "&a [*a, *a]",
        "&a {b: *a}",
        "2026-13-45",
        "2026-01-01",
        "!!int ''",
        "!!float x",
        "!!binary '***'",
        "!!timestamp x",
        "!!set {a, b}",
        "!!omap [a: 1]",
        "0x" + "f" * 6000,
        "9" * 5000,
        "[" * 3000,
        "{a: " * 400,
        "? [a, b]\n: c",
        "'not closed",
        "- a\n b",
        "\t- a",
        "a: 1\na: 2",
        "<<: 1",
        "*nobody",
        "%YAML 9.9\n---\na",
        "--- a\n--- b",
        "a: &x [1]\nb: {<<: *x}",
        "1:30:00",
        "1__0",
        "\ufeff1",
    ]
)
_BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
)
_KEYS = st.one_of(
    st.sampled_from(sorted(_DECLARED)),
    st.sampled_from(
        ["data", "method", "federation.rounds.x", "nobody.knows", ".", "", "seed.x", "local.", ".lr", "a" * 3000]
    ),
    _WORDS,
)
_VALUES = st.one_of(_JUNK.map(lambda value: json.dumps(value)), _SNIPPETS, _WORDS)


@st.composite
def _assignments(draw: st.DrawFn) -> str:
    return f"{draw(_KEYS)}{draw(st.sampled_from(['=', '=', '=', '=', '', ' = ']))}{draw(_VALUES)}"


_ONE_FAULT = st.tuples(st.sampled_from(sorted(_DECLARED)), _VALUES).map("=".join)
"""A known key: what is wrong with its value is not hidden behind another mistake."""

_GIVEN = st.one_of(*[_ONE_FAULT.map(lambda one: (one,))] * 3, st.lists(_assignments(), max_size=3).map(tuple))


@st.composite
def _files(draw: st.DrawFn) -> bytes:
    """A parameter file: sections with anything in them, or no such thing."""
    match draw(st.integers(0, 9)):
        case 0:
            return draw(st.binary(max_size=60))
        case 1:
            return draw(_SNIPPETS).encode("utf-8", "surrogatepass")
        case 2:
            return _BOMB.encode()
        case 3:
            return f"compare: {{settings: {draw(_VALUES)}}}".encode("utf-8", "surrogatepass")
    raw: dict[str, Any] = {}
    for key in draw(st.lists(st.sampled_from(sorted(_DECLARED)), max_size=4)):
        section, _, name = key.partition(".")
        value = draw(_JUNK)
        if name and isinstance(raw.setdefault(section, {}), dict):
            raw[section][name] = value
        else:
            raw[section] = value
    return json.dumps(raw).encode() if draw(st.booleans()) else yaml.safe_dump(raw).encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class Typed:
    """A command line: its words, a parameter file, and whether it is asked to end before anything is trained."""

    words: tuple[str, ...]
    file: bytes | None
    assignments: tuple[str, ...]
    out: str = "out"

    @property
    def argv(self) -> list[str]:
        params = [] if self.file is None else ["--params", "params.yaml"]
        given = [f"--set={assignment}" for assignment in self.assignments]
        tiny = [f"--set={key}={value}" for key, value in TINY.items()]
        if self.words[0] not in ("stage", "run", "sweep", "tune"):
            return [*self.words, *params]
        return [*self.words, *params, *given, *tiny, "--out", self.out]


_STAGES = st.sampled_from([("stage", "prepare"), ("stage", "partition")])
_OTHERS = st.one_of(
    st.tuples(st.just("stage"), _WORDS),
    st.tuples(st.just("list"), st.one_of(_WORDS, st.just("methods"))),
    st.tuples(st.just("show"), st.sampled_from(["method", "dataset", "model"]), _WORDS),
    st.tuples(_WORDS.filter(bool)),
)
_WITH_A_FOLLOWER = st.one_of(
    st.tuples(st.just("sweep"), _assignments().map(lambda text: f"--vary={text}"), _WORDS.map("--seeds={}".format)),
    st.tuples(st.just("run"), st.just("--seed"), _WORDS),
    st.tuples(
        st.just("tune"), _WORDS.map("--method={}".format), st.just("--trials=1"), _WORDS.map("--metric={}".format)
    ),
)
"""These start a process that logs and draws before they look at what they were given."""

_COMMANDS = st.one_of(*[_STAGES] * 8, _OTHERS, _OTHERS, _WITH_A_FOLLOWER)
_OUTS = st.one_of(
    *[st.just("out")] * 8, st.sampled_from(["a\x00b", "a\nb", "{date}", "x" * 300, "params.yaml/x", "\x1b]0;x\x07"])
)
TYPED = st.builds(Typed, _COMMANDS, st.one_of(st.none(), st.none(), _files()), _GIVEN, _OUTS)


def _inside(param: Param) -> st.SearchStrategy[Any]:
    """Values that a declaration allows, small ones."""
    if param.choices is not None:
        one = st.sampled_from(param.choices)
        return st.lists(one, max_size=2, unique=True) if isinstance(param.default, tuple) else one
    if isinstance(param.default, bool):
        return st.booleans()
    low = param.above if param.low is None else param.low
    high = param.below if param.high is None else param.high
    if "int" in param.type and not isinstance(param.default, tuple | str):
        first = 0 if low is None else int(low) + (param.low is None)
        return st.integers(first, first + 6 if high is None else min(first + 6, int(high)))
    if isinstance(param.default, float) or "float" in param.type:
        least = -10.0 if low is None else low
        most = max(10.0, least + 1) if high is None else high
        one = st.floats(
            least,
            most,
            exclude_min=param.low is None and low is not None,
            exclude_max=param.high is None and high is not None,
        )
        return st.one_of(one, st.lists(one, max_size=3)) if "list of float" in param.type else one
    return st.just(param.default)


@st.composite
def _allowed(draw: st.DrawFn, large: bool) -> dict[str, dict[str, Any]]:
    """A configuration of values each of which is allowed; whether they go together is another matter.

    Args:
        draw: of Hypothesis.
        large: models among them that take seconds for a step.
    """
    raw: dict[str, dict[str, Any]] = {}
    for section in ("method", "partition", "model"):
        name = draw(st.sampled_from([name for name in sorted(REGISTRIES[section]) if large or name[:6] != "resnet"]))
        own = declared(REGISTRIES[section][name])
        chosen = draw(st.lists(st.sampled_from(own), max_size=4, unique_by=lambda p: p.name)) if own else []
        raw[section] = {"name": name, **{param.name: draw(_inside(param)) for param in chosen}}
    for section in ("partition", "federation", "local", "evaluation", "engine", "data"):
        cls = {**SHARED, **PLAIN}[section]
        assert cls is not None
        for param in draw(st.lists(st.sampled_from(declared(cls)), max_size=2, unique_by=lambda p: p.name)):
            raw.setdefault(section, {})[param.name] = draw(_inside(param))
    for key, value in TINY.items():
        section, _, name = key.partition(".")
        raw.setdefault(section, {})[name] = value
    raw["tracking"] = {}
    raw["engine"] |= {"device": "cpu", "ray_address": None}
    raw["data"] |= {"root": None, "size": draw(st.sampled_from([None, 8, 12]))}
    raw["evaluation"] = {key: value for key, value in raw.get("evaluation", {}).items() if key != "analyses"}
    return raw


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


def _carried_out(argv: list[str]) -> Answer:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else -1
    return Answer(code, out.getvalue(), err.getvalue())


def problem_of_command(typed: Typed, place: Path) -> str | None:
    """What is wrong with how a command answered, in words; ``place`` is its own and holds ``work`` and ``outside``."""
    work = place / "work"
    if typed.file is not None:
        (work / "params.yaml").write_bytes(typed.file)
    with contextlib.chdir(work):
        answer = _carried_out(typed.argv)
    said = answer.err
    if answer.code not in (0, 2, 3, 4):
        return f"exit code {answer.code}: {said[-600:]}"
    if "Traceback" in said or "fault of protofl" in said:
        return f"a traceback: {said[-600:]}"
    lines = said.splitlines()
    if answer.code and not 1 <= len(lines) <= _MOST_LINES:
        return f"{len(lines)} lines: {said[:600]}"
    if any(len(line) > _LONGEST or "\x1b" in line for line in lines):
        return f"a line that is too long, or steers the terminal: {said[:300]!r}"
    if [path.name for path in (place / "outside").iterdir()] != ["canary"]:
        return "something outside of the folders that were named"
    left = {path.name for path in work.iterdir()} - {"params.yaml", ".protofl", "out", "x" * 300}
    if any(not name.startswith("20") for name in left):  # what {date} becomes
        return f"left {sorted(left)}"
    if answer.code == 2 and (work / "out").exists():
        return "refused, and yet there is a folder of results"
    return None


def problem_of_run(raw: dict[str, Any], place: Path) -> str | None:
    """Likewise of a run of allowed values: it ends well and whole, or is refused in a line, or fails in one."""
    folder = place / "work" / "out"
    try:
        config = Config.from_mapping(raw)
    except ProtoflError as error:
        return None if len(str(error).splitlines()) <= _MOST_LINES else f"many lines: {error}"
    except Exception as error:
        return f"{type(error).__name__} in a configuration: {error}"
    try:
        metrics = run(config, folder)
    except ProtoflError as error:
        return None if len(str(error).splitlines()) <= _MOST_LINES else f"many lines: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if run(replace(config), folder) != metrics:
        return "finished, and another result when it is asked for again"
    return None


FOUND = [
    Typed(("stage", "prepare"), None, ("seed=" + "9" * 5000,)),
    Typed(("stage", "prepare"), None, ("seed=0x" + "f" * 6000,)),
    Typed(("stage", "prepare"), None, ("local.batch_size=0x" + "f" * 6000,)),
    Typed(("stage", "prepare"), None, ("local.lr=2026-13-45",)),
    Typed(("stage", "prepare"), None, ("local.lr=!!int ''",)),
    Typed(("stage", "prepare"), None, ("local.lr=" + "[" * 3000,)),
    Typed(("stage", "prepare"), None, ("local.lr=&a [*a]",)),
    Typed(("stage", "prepare"), None, ("compare.settings={1: {}}",)),
    Typed(("stage", "prepare"), None, ("compare.settings={2026-01-01: {}}",)),
    Typed(("stage", "prepare"), None, ('plugins=["\\0"]',)),
    Typed(("stage", "prepare"), None, ("plugins=[~nobody-there/x.py]",)),
    Typed(("stage", "prepare"), None, ('data.root="\\ud800"',)),
    Typed(("stage", "partition"), None, ("partition.name=imported", 'partition.path="\\0"')),
    Typed(("stage", "prepare"), None, (), out="a\x00b"),
    Typed(("stage", "prepare"), b"seed: 2026-13-45", ()),
    Typed(("stage", "prepare"), b"local: " + b"[" * 3000, ()),
    Typed(("stage", "prepare"), b"plugins: [~nobody-there/x.py]", ()),
    Typed(("stage", "prepare"), b"1: {}\nlocal: {2: 3}", ()),
    Typed(("stage", "prepare"), b"local: {lr: 0.1, lr: 0.2}", ()),
    Typed(("stage", "prepare"), ("local: {lr: " + "x" * 100_000 + "}").encode(), ()),
    Typed(("stage", "prepare"), _BOMB.encode() + b"\nlocal: {lr: *a11}", ()),
    Typed(("stage", "prepare"), _BOMB.encode() + b"\nseed: *a8", ()),
    Typed(("show", "model", "\x1b[31m"), None, ()),
    Typed(("stage", "prepare"), None, ("\x1b[31m=1",)),
    Typed(
        ("sweep", *(f"--vary=local.{key}=[{', '.join(map(str, range(1, 400)))}]" for key in ("lr", "decay"))), None, ()
    ),
    Typed(
        ("sweep", *(f"--vary=local.{key}={','.join(map(str, range(1, 400)))}" for key in ("lr", "epochs"))), None, ()
    ),
]
"""What once ended in a traceback, in a message of thousands of signs or of many lines, or in another value silently."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """A fresh folder for every case, with a folder beside the one that commands are typed in."""
    monkeypatch.setenv("PROTOFL_CACHE", str(tmp_path / "cache"))
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)

    def make() -> Path:
        shutil.rmtree(tmp_path / "case", ignore_errors=True)
        (tmp_path / "case" / "work").mkdir(parents=True)
        (tmp_path / "case" / "outside").mkdir()
        (tmp_path / "case" / "outside" / "canary").touch()
        return tmp_path / "case"

    return make


def _every(cases: int, strategy: st.SearchStrategy[Any], check: Callable[[Any], str | None]) -> None:
    """Check so many cases, always the same ones."""

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(case: Any) -> None:
        found = check(case)
        assert found is None, f"{case}: {found}"

    one()


@pytest.mark.parametrize("typed", quick(FOUND, FOUND[2::6]), ids=range(len(FOUND)))
def test_what_was_found(typed: Typed, place: Callable[[], Path]) -> None:
    assert problem_of_command(typed, place()) is None


@pytest.mark.parametrize("cases", COUNTS)
def test_whatever_is_typed_is_answered_in_a_few_lines(cases: int, place: Callable[[], Path]) -> None:
    _every(cases, TYPED, lambda typed: problem_of_command(typed, place()))


@pytest.mark.parametrize("cases", TRAINED)
def test_allowed_values_run_or_are_refused(cases: int, place: Callable[[], Path]) -> None:
    _every(cases, _allowed(cases > 50), lambda raw: problem_of_run(raw, place()))
