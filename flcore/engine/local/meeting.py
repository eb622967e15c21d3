"""Several runs in one process that bring their clients' turns together, to be trained in one stack.

Each run is carried out by a thread of its own, in ordinary code (:func:`flcore.training.train`), up to the point where
clients train. There it waits. When all runs that are still under way have come, those at the least place are trained
and go on; the others wait on. A *place* is (round, number of the leg's first phase, number of the call within the
leg), so a run that is behind, as after a kill, is trained alone until it has caught up with the others; they wait for
it. A run that has ended or failed has left, and nobody waits for it.

Who is trained together is thus a function of which runs come to which place, and never of how fast threads are. The
same runs, begun together and not interrupted, leave the same bytes each time. A run's last bits do depend on its
company, since how a stack is put together does: trained alone, in other company, or gone on with after a kill that the
others did not suffer at the same place, its numbers agree to the tolerance of stacking and not to the bit.

One thread computes at a time. Little is lost by that, since Python's own work would not overlap in any case, and with
it nothing in the process has to be shared with care: PyTorch's global generator, from which modules are initialised,
above all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from flcore.engine.client import make_trainer
from flcore.engine.local.joined import Answer, Call, JoinedTrainer
from flcore.engine.local.serial import Outcome, Trainer, Training
from flcore.engine.pool.groups import StoppedError
from flcore.experiment.experiment import Experiment

Result = TypeVar("Result")

_Place = tuple[int, int, int]

_LOOK_AGAIN_SECONDS = 1.0  # whether the meeting was closed


def meet(works: Sequence[Callable[[Seat], Result]]) -> list[Result | Exception]:
    """Carry out runs, each on a thread of its own, one thread at a time, that train in one stack where they can.

    Args:
        works: each carries out one run with the seat that it is given, and whatever else belongs to it. Its pieces stay
            on the thread on which it is called.

    Returns:
        What they returned, or the error that they raised, in order.
    """
    meeting = Meeting(range(len(works)))
    results: dict[int, Result | BaseException] = {}
    several = torch.cuda.is_available() and torch.cuda.device_count() > 1
    device = torch.cuda.current_device() if several else None  # of this thread; a new one begins with the first GPU

    def carry_out(number: int, work: Callable[[Seat], Result]) -> None:
        if device is not None:
            torch.cuda.set_device(device)
        seat = Seat(meeting, number)
        with meeting.baton:
            try:
                results[number] = work(seat)
            except BaseException as error:
                results[number] = error
            finally:
                seat.leave()

    threads = [threading.Thread(target=carry_out, args=entry, name=f"run {entry[0]}") for entry in enumerate(works)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C, here alone: what is under way ends with the stack that it is at
        meeting.close()
        raise
    found: list[Result | Exception] = []
    for _, result in sorted(results.items()):
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
        found.append(result)
    return found


class Meeting:
    """Where runs bring their calls. Whoever computes holds the ``baton``, and lets go of it where it waits."""

    def __init__(self, runs: Sequence[int]) -> None:
        """Expect some runs, by number."""
        self.baton = threading.Condition()
        self._under_way = set(runs)
        self._calls: dict[int, tuple[_Place, Call]] = {}
        self._answers: dict[int, Answer] = {}
        self._joined = JoinedTrainer()
        self._closed = False

    def bring(self, number: int, place: _Place, call: Call) -> list[Outcome]:
        """Wait for the others and return a run's own outcomes; called with the baton.

        Raises:
            StoppedError: the meeting is closed, or the run has left it. Exception: what its training raised.
        """
        self._calls[number] = (place, call)
        while number not in self._answers:
            if self._closed or number not in self._under_way:
                raise StoppedError
            if self._calls.keys() >= self._under_way:
                self._train()
            else:
                self.baton.wait(_LOOK_AGAIN_SECONDS)
        answer = self._answers.pop(number)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _train(self) -> None:
        """Train the calls at the least place."""
        least = min(place for place, _ in self._calls.values())
        chosen = sorted(number for number, (place, _) in self._calls.items() if place == least)
        calls = [self._calls.pop(number)[1] for number in chosen]
        # In case that this thread ends in the middle: nobody waits for ever.
        self._answers |= {number: StoppedError() for number in chosen}
        try:
            self._answers |= zip(chosen, self._joined.train(calls), strict=True)
        finally:
            self.baton.notify_all()

    def leave(self, number: int) -> None:
        """Nobody waits for a run any more; called with the baton."""
        self._under_way.discard(number)
        self._calls.pop(number, None)
        self.baton.notify_all()

    def close(self) -> None:
        """Train nothing more; who waits learns it soon. Without the baton, which may be held for long."""
        self._closed = True


class Seat:
    """A run's place in a meeting."""

    def __init__(self, meeting: Meeting, number: int) -> None:
        """Sit down."""
        self._meeting, self._number = meeting, number

    def trainer(self, experiment: Experiment) -> Trainer:
        """Who trains the clients of the run."""
        return _Attending(self._meeting, self._number, experiment)

    def leave(self) -> None:
        """The run trains nothing more; a second time it does nothing."""
        self._meeting.leave(self._number)


class _Attending:
    """A run's trainer that brings what it is given to a meeting."""

    def __init__(self, meeting: Meeting, number: int, experiment: Experiment) -> None:
        self._meeting, self._number, self._experiment = meeting, number, experiment
        self._own = make_trainer(experiment)
        self._place: _Place = (0, 0, 0)

    def train(self, training: Training) -> list[Outcome]:
        """One outcome per turn, in order."""
        leg = (training.turns[0].round, training.first_phase)
        self._place = (*leg, self._place[2] + 1 if self._place[:2] == leg else 0)
        return self._meeting.bring(self._number, self._place, Call(self._experiment, self._own, training))
