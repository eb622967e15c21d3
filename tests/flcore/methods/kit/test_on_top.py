"""A method on top of another one: it forwards everything, leaves the base alone, and says what a base is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flcore.core.errors import ConfigError
from flcore.core.params import build, declared, param
from flcore.engine.local.step import qualified_name
from flcore.io.records import serialise
from flcore.methods import METHODS
from flcore.methods.api import Method
from flcore.methods.ccvr import CCVR
from flcore.methods.fedavg import FedAvg
from flcore.methods.fedcspc import FedCSPC
from flcore.methods.fedprox import FedProx
from flcore.methods.kit.on_top import WrapperMethod, possible_bases
from flcore.methods.types import Exchange, FederationContext, RoundContext, ServerStep
from tests.cases import SMALL, quick

OWN = ("AUTHORS", "name", "summary", "citation")
OF_STAGES = ("aggregates", "releases_weights_alone")
"""What follows from the stages, the base's and those that are added."""
MEMBERS = [name for name in vars(Method) if not name.startswith("_") and name not in (*OWN, *OF_STAGES)]

CSPC = {"name": "fedcspc_cnn", "projection_dim": 16}


@dataclass(frozen=True)
class Plain(WrapperMethod):
    """Adds nothing."""

    name: ClassVar[str] = "plain"
    summary: ClassVar[str] = "nothing"
    citation: ClassVar[str] = "nobody"


@pytest.fixture
def registered() -> Iterator[Callable[[type[Method]], None]]:
    """Registers plug-ins for the length of a test."""
    added: list[str] = []

    def add(method: type[Method]) -> None:
        METHODS.added[method.name] = method
        added.append(method.name)

    yield add
    for name in added:
        METHODS.added.pop(name, None)


def loud() -> type[Method]:
    """A method that answers every question with the question's name and what it was asked with."""

    def answering(name: str, member: Any) -> Any:
        if isinstance(member, property):
            return property(lambda self: f"the base's {name}")
        if callable(member):
            return lambda self, *arguments: (f"the base's {name}", arguments)
        return f"the base's {name}"

    facts = {"name": "loud", "summary": "loud", "citation": "nobody"}
    members = {name: answering(name, vars(Method)[name]) for name in MEMBERS}
    return dataclass(frozen=True)(type("Loud", (Method,), {**members, **facts}))


@pytest.mark.parametrize("member", MEMBERS)
def test_every_answer_is_the_bases(member: str, registered: Callable[[type[Method]], None]) -> None:
    """Methods, properties and facts of the class, whatever a method will have."""
    registered(loud())
    answer, declaration = getattr(Plain(base="loud"), member), vars(Method)[member]
    if callable(declaration):
        asked = tuple(object() for _ in range(len(inspect.signature(declaration).parameters) - 1))
        assert answer(*asked) == (f"the base's {member}", asked)
    else:
        assert answer == f"the base's {member}"


@pytest.mark.parametrize(
    ("base", "own"), quick([("fedpa", {"gen_steps": 2, "proto_clip": 1.0, "proto_noise": 0.5}), ("fedavg", {})], 1)
)
def test_with_nothing_added_it_is_the_base(lab: Any, base: str, own: dict[str, Any], tmp_path: Path) -> None:
    """History and memories by the byte, the state but for the run's name; and the base's account of its noise."""
    changes = {"federation": {"rounds": 2, "participation": 0.75}}
    settings = {base: {f"method.{name}": value for name, value in own.items()}}
    method = Plain(base=base, base_settings=settings)
    alone = lab.run(lab.experiment(method={"name": base, **own}, **changes), tmp_path / "base")
    found = lab.run(lab.experiment(algorithm=method, **changes), tmp_path / "plain")
    assert found.arrays == alone.arrays
    assert found.bytes["history.jsonl"] == alone.bytes["history.jsonl"]
    assert serialise(found.state.server) == serialise(alone.state.server)
    for part in ("round", "up", "down", "steps"):
        assert getattr(found.state, part) == getattr(alone.state, part)
    account = method.privacy(2)
    assert account == method.base_method.privacy(2)
    assert (account is None) == (not own)
    if account is not None:
        assert account["epsilon"] > 0


def test_possible_bases() -> None:
    """Their models answer by themselves and go on being trained."""
    found = set(possible_bases())
    assert {"fedavg", "fedprox", "moon", "fedcspc", "creff", "fedpa"} < found
    assert not found & {"local", "central", "fedproto", "fedper", "fedensemble", "gfpl", "ccvr"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base": "fedavgg"}, r"method: base = fedavgg: there is no such method; it may be .*fedavg, "),
        ({"base": "local"}, r"method: base = local: it has no trained global model.* it may be .*fedavg, "),
        ({"base_settings": {"local": {}}}, r"method: base_settings.local: it has no trained global model"),
        ({"base_settings": {"fedprox": {"method.nu": 1}}}, r"method.base_settings.fedprox.nu: unknown key"),
        ({"base_settings": {"fedprox": {"method.mu": -1}}}, r"method.base_settings.fedprox.mu = -1"),
        ({"base_settings": {"fedprox": {"mu": 1}}}, "expected dotted keys"),
        ({"base_settings": {"fedprox": {"local.lr": 1}}}, "expected dotted keys"),
        ({"base_settings": {"fedprox": 3}}, "expected dotted keys"),
        (
            {"base": "fedmlp", "base_settings": {"fedmlp": {"method.share": "extractor"}}},
            "base = fedmlp: it has no trained global model",
        ),
    ],
)
def test_what_is_no_base(values: dict[str, Any], message: str) -> None:
    """Refused with what is allowed, when the configuration is read; settings of bases that are not used too."""
    with pytest.raises(ConfigError, match=message):
        build(CCVR, values, "method")


def test_nothing_stands_on_itself(registered: Callable[[type[Method]], None]) -> None:
    """CCVR over FedCSPC, but not over CCVR, nor FedCSPC over it; nor below something else; nor without an end."""
    assert CCVR(base="fedcspc").base_method == FedCSPC()
    for method, base, message in (
        (CCVR, "ccvr", "base = ccvr: ccvr cannot wrap itself"),
        (FedCSPC, "fedcspc", "base = fedcspc: fedcspc cannot wrap itself"),
        (FedCSPC, "ccvr", "base = ccvr: it has no trained global model"),
    ):
        with pytest.raises(ValueError, match=message):
            method(base=base)

    @dataclass(frozen=True)
    class Between(WrapperMethod):
        name: ClassVar[str] = "between"

    registered(Between)
    nested = {"between": {"method.base": "fedcspc"}}
    assert CCVR(base="between").can_be_base is False
    with pytest.raises(ValueError, match="base = between: it wraps fedcspc already"):
        FedCSPC(base="between", base_settings=nested)

    @dataclass(frozen=True)
    class Endless(WrapperMethod):
        name: ClassVar[str] = "endless"
        base: str = param("endless", "itself")

    registered(Endless)
    with pytest.raises(ValueError, match="endless cannot wrap itself"):
        Endless()


def test_hyper_parameters_of_the_base() -> None:
    """Those of the base that is used; it declares where they are searched, and nobody else does."""
    settings = {"fedprox": {"method.mu": 0.5}, "moon": {"method.tau": 0.1}}
    assert CCVR(base="fedprox", base_settings=settings).base_method == FedProx(mu=0.5)
    assert CCVR(base_settings=settings).base_method == FedAvg()
    own = {field.name for field in fields(WrapperMethod)}
    assert own == {"base", "base_settings"}
    assert all(declaration.search is None for declaration in declared(FedCSPC) if declaration.name in own)


@dataclass(frozen=True)
class TwoLegs(FedAvg):
    """A round that begins with a question to everybody."""

    name: ClassVar[str] = "two_legs"

    def round_exchanges(self, round_number: int, setting: FederationContext) -> tuple[Exchange, ...]:
        return Exchange("ask", participants="all", phases=(), server_steps=("note",)), Exchange()

    def server_steps(self) -> dict[str, ServerStep]:
        return {"note": lambda server, replies, ctx: (server, {}), **super().server_steps()}


def test_server_steps_after_those_of_the_base(lab: Any, registered: Callable[[type[Method]], None]) -> None:
    """An exchange that had every stage has the base's by name, and does not run what is added."""
    setting = lab.experiment().setting
    plain = Plain()
    assert plain.round_exchanges(1, setting) == (Exchange(),)
    assert [exchange.server_steps for exchange in plain.exchanges_with(1, setting)] == [("aggregate",)]
    assert [exchange.server_steps for exchange in plain.exchanges_with(1, setting, "one", "two")] == [
        ("aggregate", "one", "two")
    ]
    registered(TwoLegs)
    exchanges = Plain(base="two_legs").exchanges_with(1, setting, "one")
    assert [(exchange.name, exchange.server_steps) for exchange in exchanges] == [
        ("ask", ("note",)),
        ("train-clients", ("note", "aggregate", "one")),
    ]


def test_names_that_stand_twice_are_refused(registered: Callable[[type[Method]], None]) -> None:
    plain = Plain()
    assert plain.merged({"a": 1}, {"b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(ConfigError, match=r"method\.base = fedavg: plain adds 'b', which it has"):
        plain.merged({"a": 1, "b": 2}, {"b": 2})

    @dataclass(frozen=True)
    class Gathering(FedAvg):
        name: ClassVar[str] = "gathering"

        def server_steps(self) -> dict[str, ServerStep]:
            return {"gather-prototypes": lambda server, replies, ctx: (server, {})}

    registered(Gathering)
    with pytest.raises(ConfigError, match="gathering: fedcspc adds 'gather-prototypes', which it has"):
        FedCSPC(base="gathering").server_steps()


@pytest.mark.parametrize("base", quick(possible_bases(), ("scaffold",)))
def test_over_every_base(lab: Any, base: str, tmp_path: Path) -> None:
    """One round: what the base holds and what clients remember are its own run's, to the bit.

    CCVR: when training is over only the base's global model goes down, statistics alone go up, and the head has moved.
    FedCSPC: projection and head have moved, from those of the base's global model.
    """
    changes = {"model": CSPC, "federation": {"rounds": 1}, "local__steps": 2}
    alone = lab.run(lab.experiment(method={"name": base, **SMALL.get(base, {})}, **changes), tmp_path / "base")
    settings = {base: {f"method.{name}": value for name, value in SMALL.get(base, {}).items()}}
    tops: tuple[type[WrapperMethod], ...] = (CCVR,) if base == "fedcspc" else (CCVR, FedCSPC)
    for top in tops:
        method = {"name": top.name, "base": base, "base_settings": settings, **SMALL[top.name]}
        if top is FedCSPC and not METHODS[base]().broadcasts_model:
            method["feedback"] = False  # refused
        experiment = lab.experiment(method=method, **changes)
        run = lab.run(experiment, tmp_path / top.name)
        assert serialise(run.state.server.only(*alone.state.server)) == serialise(alone.state.server)
        for client in range(4):
            assert serialise(run.client_state(client)) == serialise(alone.client_state(client))
        setting, server = experiment.setting, run.state.server
        before = experiment.method.base_method.global_model(server)
        after = experiment.method.global_model(server)
        moved = {name.split(".")[0] for name, value in before.params.items() if not value.equal(after.params[name])}
        assert moved == ({"head"} if top is CCVR else {"projection", "head"})
        if top is CCVR:
            sent = experiment.method.broadcast(server, 0, RoundContext(setting, 1, CCVR.collect_leg))
            assert serialise(sent) == serialise({"model": before})
            reply, _ = lab.train(
                experiment, 0, exchange=len(experiment.method.round_exchanges(1, setting)) - 1, server=server
            )
            assert set(reply.message) == {"statistics"}


@pytest.mark.parametrize(
    ("top", "base", "own"),
    quick(
        [
            ("ccvr", "moon", {}),
            ("lda_head", "moon", {}),
            ("ccvr", "fedproc", {"weighted": True}),
            ("ccvr", "creff", SMALL["creff"]),
        ],
        2,
    ),
)
def test_until_the_last_round_it_is_the_base(
    lab: Any, top: str, base: str, own: dict[str, Any], tmp_path: Path
) -> None:
    """What the base holds, what clients remember and every round but the last, to the bit.

    The last round scores the model before the new head beside it, which the server was sent for.
    """
    changes = {"federation": {"rounds": 2, "participation": 0.75}, "local__momentum": 0.5}
    alone = lab.run(lab.experiment(method={"name": base, **own}, **changes), tmp_path / "base")
    settings = {base: {f"method.{name}": value for name, value in own.items()}}
    method = {"name": top, "base": base, "base_settings": settings, **SMALL.get(top, {})}
    experiment = lab.experiment(method=method, **changes)
    run, asked = lab.run(experiment, tmp_path / "top"), experiment.method
    assert serialise(run.state.server.only(*alone.state.server)) == serialise(alone.state.server)
    final = asked.base_method.global_model(alone.state.server)
    assert not lab.same(asked.global_model(run.state.server), final)
    sent = asked.broadcast(run.state.server, 0, RoundContext(experiment.setting, 2, type(asked).collect_leg))
    assert serialise(sent) == serialise({"model": final})
    for client in range(4):
        assert serialise(run.client_state(client)) == serialise(alone.client_state(client))
    first, expected = dict(run.history[0]), alone.history[0]
    before = "before_calibration" if top == "ccvr" else "before_discriminant"
    assert first.pop("alternatives")[before]["top1_global"] == expected["top1_global"]
    assert first == {key: value for key, value in expected.items() if key != "alternatives"}
    last = run.history[1]["alternatives"][before]
    assert last == {key: alone.history[1][key] for key in ("top1_global", "mean_local", "pooled_local")}
    assert run.state.steps == alone.state.steps
    assert top == "ccvr" or run.history[1]["server"] == {"shrinkage": 0.01, "answers": 4}


def test_what_is_forwarded_has_a_name_that_compiled_steps_can_use() -> None:
    name = qualified_name(METHODS["ccvr"]().loss)
    assert name is not None and name.startswith("flcore.methods.kit.on_top.WrapperMethod.loss of CCVR(")
