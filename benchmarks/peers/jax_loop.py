"""The work of ``overhead`` in bare JAX: a vmap over the clients of a round, a scan over their steps, one jit per round.

What was chosen, and why:

- All clients' images lie on the device; the jitted round is given the cohort's numbers and a key, draws the batches,
  trains, and averages parameters and BatchNorm's statistics. Nothing comes back to Python but the weights.
- The network is written by hand (`jax_network.py`), with no library for layers or optimisers.
- The first round compiles; ``rounds`` of the benchmark leave the first one out, the process's seconds do not.
- One process, on one core or with a GPU (`jax_network.py`).
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial

import numpy as np

from benchmarks.peers.jax_network import Array, Tree, jax, jnp, read_inputs, step
from benchmarks.work import Work, report


def _client(
    work: Work, parameters: Tree, statistics: Tree, images: Array, labels: Array, key: Array
) -> tuple[Tree, Tree]:
    """One participation: shuffled passes over images [n, 1, 28, 28], cut into batches, scanned."""
    passes = -(-work.steps * work.batch_size // work.samples)
    orders = jnp.concatenate([jax.random.permutation(own, work.samples) for own in jax.random.split(key, passes)])
    batches = orders[: work.steps * work.batch_size].reshape(work.steps, work.batch_size)

    def body(state: tuple[Tree, Tree], chosen: Array) -> tuple[tuple[Tree, Tree], None]:
        return step(*state, images[chosen], labels[chosen], work), None

    trained: tuple[Tree, Tree] = jax.lax.scan(body, (parameters, statistics), batches)[0]
    return trained


def main() -> None:
    """The work as JSON and the file of inputs on the command line, what came of it on standard output."""
    work = Work(**json.loads(sys.argv[1]))
    if work.samples % work.batch_size:
        raise ValueError("jax: batches must fill a pass over a client's samples")
    parameters, statistics, images, labels = read_inputs(sys.argv[2])
    images, labels = jnp.asarray(images), jnp.asarray(labels)

    @jax.jit  # type: ignore[untyped-decorator]
    def round_(parameters: Tree, statistics: Tree, cohort: Array, key: Array) -> tuple[Tree, Tree]:
        one = partial(_client, work, parameters, statistics)
        trained = jax.vmap(one)(images[cohort], labels[cohort], jax.random.split(key, work.cohort))
        averaged: tuple[Tree, Tree] = jax.tree.map(lambda values: values.mean(0), trained)
        return averaged

    generator, key, seconds = np.random.default_rng(0), jax.random.key(0), []
    for number in range(work.rounds):
        begin = time.perf_counter()
        cohort = generator.permutation(work.clients)[: work.cohort]
        state = round_(parameters, statistics, cohort, jax.random.fold_in(key, number))
        parameters, statistics = jax.block_until_ready(state)
        seconds.append(time.perf_counter() - begin)
    report(seconds, parameters | statistics)
