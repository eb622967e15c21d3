"""A process that does the work of a benchmark with none of our packages but its script, and says what it has done."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common import Bench, Execution, Timing, steady
from benchmarks.peers.environment import PEERS, copy_scripts
from benchmarks.work import Work
from benchmarks.workload import write_inputs
from flcore.core.errors import RunError


@dataclass(frozen=True)
class Done:
    """The process as a whole, seconds of each round by its own clock, and the digest of the final weights."""

    execution: Execution
    rounds: Sequence[float]
    digest: str

    def timings(self, work: Work, process: str, rounds: str) -> dict[str, Timing]:
        """Of the whole process and of its rounds (see :func:`~benchmarks.common.steady`), by these names."""
        steps, peak = work.total_steps, self.execution.peak_mb
        return {
            rounds: Timing(steady(self.rounds), steps, peak),
            process: Timing(self.execution.seconds, steps, peak),
        }


class Processes:
    """Processes that do some work, each time from the same weights on the same images."""

    def __init__(self, bench: Bench, work: Work) -> None:
        """Write their scripts and what they read."""
        self._bench, self.work = bench, work
        self._scripts = copy_scripts(bench.folder / "scripts")
        self._inputs = bench.folder / f"{work.model}-{work.clients}.npz"  # of one benchmark there may be several works
        write_inputs(work, self._inputs)

    def peer(self, name: str, python: str, case: str, cores: int = Work.cores) -> Done:
        """Another simulator's, with the interpreter of its environment.

        Raises:
            RunError: it failed, or has not done what was asked of it.
        """
        return self.start(case, PEERS[name].module, python, PEERS[name].environment, cores)

    def start(self, case: str, module: str, python: str, variables: Mapping[str, str], cores: int = Work.cores) -> Done:
        """Call the ``main`` of a module that prints the seconds of its rounds and the digest of its weights.

        Not with ``-m``: Ray's workers must find the module's functions under the module's own name.

        Raises:
            RunError: it failed, or has not done what was asked of it.
        """
        start = f"from {module} import main; main()"
        places = {"PYTHONPATH": str(self._scripts), "FLWR_HOME": str(self._bench.folder / "flower")}
        work = json.dumps(dataclasses.asdict(dataclasses.replace(self.work, cores=cores)))
        done = self._bench.execute(case, [python, "-c", start, work, str(self._inputs)], {**variables, **places})
        try:
            rounds, digest = done.printed["rounds"], done.printed["digest"]
        except (ValueError, LookupError) as error:
            raise RunError(f"bench {self._bench.name}, {case}: it did not say what it had done") from error
        if len(rounds) != self.work.rounds:
            raise RunError(f"bench {self._bench.name}, {case}: {len(rounds)} rounds instead of {self.work.rounds}")
        return Done(done, rounds, digest)
