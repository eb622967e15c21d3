"""What fails, and where it says so: the same words everywhere; clients named, or left out and counted."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from flcore.core.errors import ConfigError, DataError, RunError
from flcore.engine.checkpoint import Checkpoint
from flcore.engine.client import ClientRunner
from flcore.engine.exchange import ExchangeWork, Failure
from flcore.engine.failures import ClientError, LocatedError, client_step, error_context, pack_error, unpack_error
from flcore.engine.orchestrator import InlineOrchestrator
from flcore.engine.pool.executors import InlineExecutor
from flcore.engine.pool.task import StoppedError
from flcore.engine.rounds import run_name
from flcore.engine.run_state import RunState
from flcore.io.messages import Weights
from flcore.io.records import Record, serialise
from flcore.io.rows import Row, save_rows
from flcore.methods.fedavg import FedAvg
from flcore.methods.fedproto import FedProto
from flcore.methods.types import ClientContext, LossInputs, Replies, RoundContext

# ---- where it happened -------------------------------------------------------------------------------------------


def raised(error: Exception, clients: Any = (5,), part: str = "reply") -> Exception:
    """What comes out of a part of a turn in which an error is raised."""
    try:
        with client_step(ExchangeWork(3, 1, "train-clients", 5, "", {}, {}), clients, part):
            raise error
    except Exception as found:
        return found


def test_an_error_in_a_turn_says_where() -> None:
    error = raised(TypeError("no such thing\nsecond line"))
    assert isinstance(error, ClientError) and isinstance(error, RunError)
    assert str(error) == "round 3, client 5 (train-clients, reply): TypeError: no such thing"
    assert (error.round, error.exchange, error.clients, error.part) == (3, "train-clients", (5,), "reply")
    assert error.cause == "TypeError: no such thing"
    assert error.details.startswith("Traceback") and error.details.endswith("second line\n")
    assert ", in raised" in error.details
    assert str(raised(AssertionError())) == "round 3, client 5 (train-clients, reply): AssertionError"


@pytest.mark.parametrize(
    ("clients", "named"),
    [([2], "client 2"), ([4, 1], "clients 1 and 4"), ([3, 1, 2], "clients 1, 2 and 3"),
     (range(128), "clients 0, 1, 2, 3 and 124 others")],
)  # fmt: skip
def test_the_clients_of_a_stack_are_named(clients: Any, named: str) -> None:
    error = raised(KeyError("x"), clients, "local training, phase 2")
    assert str(error) == f"round 3, {named} (train-clients, local training, phase 2): KeyError: 'x'"


def test_what_the_user_can_mend_is_left_as_it_is() -> None:
    for plain in (ConfigError("data.size = 3"), DataError("file: gone")):
        assert raised(plain) is plain
    said = raised(RunError("no room", "Traceback of somewhere else"))
    assert str(said) == "round 3, client 5 (train-clients, reply): no room"
    assert isinstance(said, RunError) and said.details == "Traceback of somewhere else"
    # Whoever said first where it was knows best.
    inner = ClientError(3, "train-clients", [1], "reply", "ValueError: x")
    assert raised(inner, [0, 1, 2], "local training") is inner


def test_the_servers_work_says_where_too() -> None:
    """A plain ValueError or ArithmeticError is how a method speaks to people; anything else is named by its type."""
    for error, said in (
        (ValueError("nothing to fuse"), "nothing to fuse"),
        (ArithmeticError("the head diverged; lower its rate"), "the head diverged; lower its rate"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (TypeError("unsupported"), "TypeError: unsupported"),
        (RunError("no room"), "no room"),
    ):
        with pytest.raises(LocatedError) as caught, error_context("round 3, server step calibrate"):
            raise error
        assert str(caught.value) == f"round 3, server step calibrate: {said}"
        assert "Traceback" in caught.value.details
    with pytest.raises(ConfigError, match=r"^as it is$"), error_context("round 3"):
        raise ConfigError("as it is")


@pytest.mark.parametrize(
    "error",
    [
        ClientError(3, "train-clients", [5, 7], "reply", "TypeError: x", "Traceback ..."),
        LocatedError("round 3, server step calibrate: x", "Traceback ..."),
        ConfigError("data.size = 3"),
        DataError("file: gone"),
        OSError(28, "No space left on device", "file"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_through_a_pipe_as_it_was(error: Exception) -> None:
    found = unpack_error(pack_error(error))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert vars(found) == vars(error)


def test_an_error_that_nobody_located_comes_through_with_its_traceback() -> None:
    try:
        raise IndexError("out of range")
    except IndexError as error:
        found = unpack_error(pack_error(error))
    assert isinstance(found, RunError)
    assert str(found) == "IndexError: out of range"
    assert "test_an_error_that_nobody_located" in found.details


# ---- clients that fail -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", [False, True], ids=["serial", "stacked"])
@pytest.mark.parametrize("method", ["fedavg", "fedproto", "local"])
def test_divergence_names_round_and_client(lab: Any, method: str, stack: bool, tmp_path: Path) -> None:
    """All four diverge; serially client 0 is the first to be tried, in a stack the first is that of most steps, 3."""
    first = 3 if stack else 0
    expected = (
        rf"^round 1, client {first} \(train-clients, local training\): training diverged "
        r"\(mean loss: cross_entropy .*lower local\.lr"
    )
    with pytest.raises(RunError, match=expected):
        lab.run(lab.experiment(method__name=method, local__lr=1e6, engine__stack=stack), tmp_path / "run")
    assert not (tmp_path / "run" / "history.jsonl").exists()  # nothing of the failed round was committed
    assert Checkpoint(tmp_path / "run").read_state().round == 0


@pytest.mark.parametrize("stack", [False, True], ids=["serial", "stacked"])
def test_an_infinite_loss_is_a_failure(lab: Any, stack: bool) -> None:
    """Head rows ±2e38 for pixel 0: logits of (1, 0) differ by 4e38, beyond float32; the gradient is finite."""
    experiment = lab.linear([[1, 0], [0, 1]], [1, 1], [[0, 1]], engine__stack=stack)
    huge = Weights({"head.weight": torch.tensor([[2e38, 0.0], [-2e38, 0.0]]), "head.bias": torch.zeros(2)})
    failure, _ = lab.train(experiment, server={"model": huge})
    assert isinstance(failure, Failure)
    assert failure.cause.startswith("training diverged (mean loss: cross_entropy inf)")


@dataclass(frozen=True)
class Poisoned(FedProto):
    """FedProto in which client 2 starts from weights that are not numbers in the rounds given."""

    name = "fedproto"
    rounds: tuple[int, ...] = (1, 2, 3)

    def initial_weights(self, ctx: ClientContext) -> Weights:
        start = super().initial_weights(ctx)
        if ctx.client != 2 or ctx.round not in self.rounds:
            return start
        return Weights({name: tensor * torch.nan for name, tensor in start.params.items()}, start.buffers)


@dataclass(frozen=True)
class Deaf(FedProto):
    """FedProto whose server does not hear client 2 in the rounds given."""

    name = "fedproto"
    rounds: tuple[int, ...] = (1, 2, 3)

    def server_steps(self) -> Any:
        ((name, stage),) = super().server_steps().items()

        def hear(server: Record, replies: Replies, ctx: RoundContext) -> Any:
            deaf = ctx.round in self.rounds
            return stage(server, Replies({k: said for k, said in replies.items() if k != 2 or not deaf}), ctx)

        return {name: hear}


def dropping(lab: Any, algorithm: Any, **changes: Any) -> Any:
    changes = {"federation__rounds": 3, "federation__on_client_error": "drop", **changes}
    return lab.experiment(algorithm=algorithm, **changes)


@pytest.mark.parametrize("stack", [False, True], ids=["serial", "stacked"])
def test_the_others_go_on_as_if_it_had_not_answered(lab: Any, stack: bool, tmp_path: Path) -> None:
    """The server's prototypes and the memories of clients 0, 1 and 3 are, to the bit, those of a server deaf to 2."""
    run = lab.run(dropping(lab, Poisoned(), engine__stack=stack), tmp_path / "dropped")
    expected = lab.run(dropping(lab, Deaf(), engine__stack=stack), tmp_path / "deaf")
    assert serialise(run.state.server) == serialise(expected.state.server)
    for client in (0, 1, 3):
        assert serialise(run.client_state(client)) == serialise(expected.client_state(client))
    assert run.client_state(2) == {}
    # It received every broadcast all the same, and sent nothing.
    assert run.history[-1]["bytes_down"] == expected.history[-1]["bytes_down"]
    assert run.history[-1]["bytes_up"]["prototypes"] < expected.history[-1]["bytes_up"]["prototypes"]
    assert [record["participants"] for record in run.history] == [[0, 1, 3]] * 3


def test_failures_are_recorded_and_counted(lab: Any, tmp_path: Path) -> None:
    """Client 2 fails in rounds 1 and 3; what it learnt in round 2 it still has."""
    run = lab.run(dropping(lab, Poisoned(rounds=(1, 3))), tmp_path / "run")
    assert [(number, client) for number, client, _ in run.failures] == [(1, 2), (3, 2)]
    why = "train-clients, local training: training diverged"
    assert all(cause.startswith(why) for _, _, cause in run.failures)
    assert [[number for number, *_ in record.get("failures", ())] for record in run.history] == [[1], [], [3]]
    assert run.state.failures == ()
    assert [record["participants"] for record in run.history] == [[0, 1, 3], [0, 1, 2, 3], [0, 1, 3]]
    assert run.state.client_states == {0: 3, 1: 3, 2: 2, 3: 3}


def test_a_record_lists_the_failures_since_the_one_before(lab: Any, tmp_path: Path) -> None:
    """Evaluated in rounds 2 and 4; client 2 fails in rounds 1, 3 and 4."""
    experiment = dropping(lab, Poisoned(rounds=(1, 3, 4)), federation__rounds=4, evaluation={"every": 2})
    run = lab.run(experiment, tmp_path / "run")
    assert [[number for number, *_ in record["failures"]] for record in run.history] == [[1], [3, 4]]


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_failure_survives_a_resume(lab: Any, stops: Any, after: bool, tmp_path: Path) -> None:
    experiment = lab.experiment(
        spec=lab.ToySpec(encoder=True),
        algorithm=Poisoned(rounds=(1,)),
        federation={"rounds": 1, "on_client_error": "drop"},
    )
    stops.everywhere(lab, experiment, tmp_path, after=after)
    assert [(n, k) for n, k, _ in Checkpoint(tmp_path / "whole").records("history.jsonl")[0]["failures"]] == [(1, 2)]


def test_a_failure_on_the_disk_is_not_tried_again(lab: Any, tmp_path: Path) -> None:
    experiment = dropping(lab, Poisoned(rounds=(1,)))
    checkpoint = Checkpoint(tmp_path / "run")
    checkpoint.start(RunState(0, Record(experiment.method.start_server(experiment.setting))))
    executor = InlineExecutor(experiment, checkpoint)
    work = lab.handed_out(experiment, checkpoint.read_state())
    assert isinstance(executor.train(work, [[2]])[2], Failure)
    checkpoint.client_results.clear()
    save_rows(checkpoint.client_results.part_file(1, 0), {2: Row({}, {"failure": {"cause": "as it was"}})}, 1, work.run)
    assert executor.train(work, [[2]])[2] == Failure("as it was")


def test_a_disk_that_fails_drops_no_client(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where clients that fail are left out: what the system refuses is no failure of theirs."""

    def refused(*arguments: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    with monkeypatch.context() as patch:
        patch.setattr(ClientRunner, "train", refused)
        with pytest.raises(RunError, match=r"round 1, client 0 .*No space left on device"):
            lab.run(dropping(lab, FedAvg()), tmp_path / "run")
    run = lab.run(dropping(lab, FedAvg()), tmp_path / "run")
    assert run.bytes == lab.run(dropping(lab, FedAvg()), tmp_path / "whole").bytes


@pytest.mark.parametrize("choice", ["stop", "drop"])
def test_a_round_in_which_everybody_fails_stops_the_run(lab: Any, choice: str, tmp_path: Path) -> None:
    """Else a run in which nothing works would end well, with the initial model."""
    changes = {"federation": {"rounds": 2, "on_client_error": choice}, "local__lr": 1e6}
    with pytest.raises(RunError) as caught:
        lab.run(lab.experiment(**changes), tmp_path / "run")
    if choice == "drop":
        assert str(caught.value).startswith(
            "round 1: all 4 clients failed; the first of them, client 0 (train-clients, local training: training div"
        )
    assert Checkpoint(tmp_path / "run").read_state().round == 0


def test_after_a_round_in_which_everybody_failed_all_are_tried_again(lab: Any, tmp_path: Path) -> None:
    """What made them fail may have been mended; the failures themselves are nothing to keep."""
    with pytest.raises(RunError, match="all 4 clients failed"):
        lab.run(dropping(lab, Erring(clients=(0, 1, 2, 3))), tmp_path / "run")
    assert not (tmp_path / "run" / "legs" / "0001").exists()
    Erring.mended = True
    try:
        run = lab.run(dropping(lab, Erring(clients=(0, 1, 2, 3))), tmp_path / "run")
    finally:
        Erring.mended = False
    assert run.history[-1]["participants"] == [0, 1, 2, 3]


@dataclass(frozen=True)
class Misfit(FedAvg):
    """FedAvg whose client 2 answers other arrays than it was sent: one is changed, left out, or another is there."""

    name = "misfit"
    kind: str = "one-value"

    def reply(self, ctx: ClientContext, trained: Any) -> Any:
        message, kept = super().reply(ctx, trained)
        params = dict(message["model"].params)
        first = next(iter(params))
        if ctx.client == 2:
            if self.kind == "one-value":
                params[first] = params[first].flatten()[:1]
            elif self.kind == "double":
                params[first] = params[first].double()
            elif self.kind == "too-few":
                del params[first]
            else:
                params["more"] = torch.zeros(3)
        return {**message, "model": Weights(params, message["model"].buffers)}, kept


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "one-value",
            r"has head\.weight of shape \[1\] and torch\.float32, and was sent \[6, 256\] and torch\.float32",
        ),
        (
            "double",
            r"has head\.weight of shape \[6, 256\] and torch\.float64, and was sent \[6, 256\] and torch\.float32",
        ),
        ("too-few", r"has other arrays than it was sent: head\.weight"),
        ("more", r"has other arrays than it was sent: more"),
    ],
)
def test_an_answer_that_does_not_fit_what_was_sent_is_not_folded(
    lab: Any, kind: str, said: str, tmp_path: Path
) -> None:
    """One value would be added to each of the mean; nothing of it is kept, so that the run goes on when it fits."""
    experiment = lab.experiment(algorithm=Misfit(kind=kind), spec=lab.ToySpec())
    with pytest.raises(ClientError, match=rf"^round 1, client 2 \(train-clients, reply\): its model {said}$"):
        lab.run(experiment, tmp_path / "run")
    checkpoint = Checkpoint(tmp_path / "run")
    run = checkpoint.load(run_name(experiment)).run
    found = checkpoint.client_results.load_all(1, range(4), run.digest)
    assert [result is not None for result in found.values()] == [True, True, False, False]
    dropped = lab.run(dropping(lab, Misfit(kind=kind)), tmp_path / "dropped")
    assert [record["participants"] for record in dropped.history] == [[0, 1, 3]] * 3


# ---- errors in a method's code -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Erring(FedAvg):
    """FedAvg with a fault in a part of some clients' turns."""

    name = "erring"
    clients: tuple[int, ...] = (2,)
    part: str = "reply"
    error: type[Exception] = TypeError
    mended = False

    def _fault(self, part: str, client: int) -> None:
        if part == self.part and client in self.clients and not self.mended:
            raise self.error(f"no {part}")

    def broadcast(self, server: Record, client: int, ctx: RoundContext) -> Any:
        self._fault("broadcast", client)
        return super().broadcast(server, client, ctx)

    def loss_inputs(self, ctx: ClientContext) -> LossInputs:
        self._fault("context", ctx.client)
        return super().loss_inputs(ctx)

    def reply(self, ctx: ClientContext, trained: Any) -> Any:
        self._fault("reply", ctx.client)
        return super().reply(ctx, trained)


@pytest.mark.parametrize("stack", [False, True], ids=["serial", "stacked"])
@pytest.mark.parametrize(
    ("part", "named", "by_itself"),
    [("broadcast", "receive", False), ("context", "local training", False), ("reply", "reply", True)],
)
def test_an_error_names_client_leg_and_part(
    lab: Any, part: str, named: str, by_itself: bool, stack: bool, tmp_path: Path
) -> None:
    """In a stack the clients who were worked on together, where it cannot be told whose fault it was."""
    with pytest.raises(ClientError) as caught:
        lab.run(lab.experiment(algorithm=Erring(part=part), engine__stack=stack), tmp_path / "run")
    alone = by_itself or not stack or part == "broadcast"
    who = "client 2" if alone else "clients 0, 1, 2 and 3"
    assert str(caught.value).startswith(f"round 1, {who} (train-clients, {named}")
    assert str(caught.value).endswith(f"): TypeError: no {part}")
    assert "in _fault" in caught.value.details


@pytest.mark.parametrize("part", ["broadcast", "context"])
def test_of_a_stack_those_fail_alone_whose_fault_it_is(lab: Any, part: str, tmp_path: Path) -> None:
    """Stacks [3, 1] and [2, 0] by their steps, 6, 4, 4, 3: an error of client 3's costs client 3 alone."""
    changes = {"engine": {"stack": True, "stack_size": 2}}
    run = lab.run(dropping(lab, Erring(part=part, clients=(3,)), **changes), tmp_path / "run")
    assert [(number, client) for number, client, _ in run.failures] == [(n, 3) for n in (1, 2, 3)]
    assert [record["participants"] for record in run.history] == [[0, 1, 2]] * 3


@pytest.mark.parametrize("stack", [False, True], ids=["serial", "stacked"])
@pytest.mark.parametrize("part", ["context", "reply"])
@pytest.mark.parametrize("error", [MemoryError, OSError, torch.OutOfMemoryError])
def test_what_the_machine_lacks_is_no_clients_failure(
    lab: Any, error: type[Exception], part: str, stack: bool, tmp_path: Path
) -> None:
    """Memory or disk: the run stops, and does not go on without the client."""
    experiment = dropping(lab, Erring(part=part, error=error), spec=lab.ToySpec(), engine__stack=stack)
    with pytest.raises(RunError, match=rf"^round 1, client.*: {error.__name__}: no {part}$"):
        lab.run(experiment, tmp_path / "run")


def test_who_could_not_even_be_sent_its_message_received_nothing(lab: Any, tmp_path: Path) -> None:
    run = lab.run(dropping(lab, Erring(part="broadcast")), tmp_path / "run")
    assert [client for _, client, _ in run.failures] == [2, 2, 2]
    assert run.history[-1]["bytes_down"]["model"] == 3 * 3 * 4 * run.state.server["model"].num_parameters


@pytest.mark.parametrize("error", [ConfigError, DataError])
def test_what_the_user_can_mend_always_stops_the_run(lab: Any, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error, match=r"^no reply$"):
        lab.run(dropping(lab, Erring(error=error)), tmp_path / "run")


def test_a_closed_executor_begins_nothing(lab: Any, tmp_path: Path) -> None:
    """What another thread of an orchestrator still asks for is refused; what was being trained is not kept."""
    experiment = lab.experiment()
    checkpoint = Checkpoint(tmp_path / "run")
    checkpoint.start(RunState(0, Record(experiment.method.start_server(experiment.setting))))
    executor = InlineExecutor(experiment, checkpoint)
    work = lab.handed_out(experiment, checkpoint.read_state())
    executor.train(work, [[0]])
    executor.close()
    with pytest.raises(StoppedError, match=r"^training was stopped$"):
        executor.train(work, [[0], [1]])
    assert {path.name for path in (tmp_path / "run" / "legs" / "0001").iterdir()} == {"0000.safetensors"}


def test_an_interrupt_waits_for_nobody() -> None:
    """One of three pieces of work is interrupted: the one under way is not waited for, the last is never begun."""
    begun, go_on = [], threading.Event()

    def work(item: int) -> None:
        begun.append(item)
        if item == 0:
            raise KeyboardInterrupt
        go_on.wait(20)

    with pytest.raises(KeyboardInterrupt):
        InlineOrchestrator(2).map("train-clients", work, [0, 1, 2, 3, 4, 5])
    assert not go_on.is_set()
    go_on.set()
    assert 5 not in begun


def test_an_error_waits_for_nobody() -> None:
    """Of six pieces the second fails: the first, which is under way, is not waited for, the last is never begun."""
    begun, ended, go_on = [], [], threading.Event()

    def work(item: int) -> int:
        begun.append(item)
        if item == 1:
            raise RunError("client 1 fails")
        go_on.wait(10)
        ended.append(item)
        return item

    with pytest.raises(RunError, match="client 1 fails"):
        InlineOrchestrator(2).map("train-clients", work, [0, 1, 2, 3, 4, 5])
    assert not ended and 5 not in begun
    go_on.set()
    assert InlineOrchestrator(2).map("train-clients", work, [5, 0, 4, 2, 3]) == [5, 0, 4, 2, 3]
