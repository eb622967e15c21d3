"""The work of ``overhead`` in bare JAX: a vmap over the clients of a round, a scan over their steps, one jit per round.

All images are on the device; the jitted round gets the cohort's numbers and a key, draws the batches, trains, and
averages parameters and BatchNorm's statistics. The first round compiles. One process, on one core or with a GPU.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np

from benchmarks.peers.jax_network import Array, Tree, jax, jnp, read_inputs, step
from benchmarks.work import Work


def _client(
    work: Work, parameters: Tree, statistics: Tree, images: Array, labels: Array, key: Array
) -> tuple[Tree, Tree]:
    """Train a client once: scan batches of shuffled passes over images [n, 1, 28, 28]."""
    passes = -(-work.steps * work.batch_size // work.samples)
    orders = jnp.concatenate([jax.random.permutation(own, work.samples) for own in jax.random.split(key, passes)])
    batches = orders[: work.steps * work.batch_size].reshape(work.steps, work.batch_size)

    def body(state: tuple[Tree, Tree], chosen: Array) -> tuple[tuple[Tree, Tree], None]:
        return step(*state, images[chosen], labels[chosen], work), None

    trained: tuple[Tree, Tree] = jax.lax.scan(body, (parameters, statistics), batches)[0]
    return trained


def simulate(work: Work, inputs: str) -> tuple[list[float], Tree]:
    """Do the work."""
    parameters, statistics, images, labels = read_inputs(inputs)
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
    return seconds, parameters | statistics
