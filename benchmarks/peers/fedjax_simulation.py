"""The work of ``overhead`` in FedJAX; runs in an environment that has it.

What was chosen, and why:

- ``fedjax.federated_averaging`` cannot be used: it steps by what ``grad_fn`` returns, which is gradients alone, and
  ``fedjax.Model`` returns predictions alone, so that BatchNorm's statistics cannot leave a step. It is written again
  with what it is made of, ``for_each_client``, whose state between steps is free: parameters, statistics and
  the optimiser's state; the server takes the mean of parameters and statistics with ``tree_util``.
- Data are ``InMemoryFederatedData``; clients are drawn by ``UniformGetClientSampler``; batches come from
  ``shuffle_repeat_batch``, seeded by round and client (its seed would otherwise be the same in every round).
- ``fedjax.optimizers.sgd`` (optax) with 0.05.
- The back end is FedJAX's default on a CPU, a jitted step called from Python; the other one wants several devices.
- JAX 0.4.35: FedJAX calls ``jax.tree_map``, which later ones lack.
- The network is that of the bare JAX loop. One process on one core.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.peers.jax_network import Tree, jax, loss, read_inputs
from benchmarks.work import Work, report

import fedjax  # type: ignore[import-not-found]  # isort: skip  # JAX reads its flags first


def _trainer(work: Work) -> Any:
    optimizer = fedjax.optimizers.sgd(learning_rate=work.lr)
    gradient = jax.grad(loss, has_aux=True)

    def client_init(shared: tuple[Tree, Tree], client_input: Any) -> dict[str, Any]:
        parameters, statistics = shared
        return {"parameters": parameters, "statistics": statistics, "optimizer": optimizer.init(parameters)}

    def client_step(state: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
        gradients, statistics = gradient(state["parameters"], state["statistics"], batch["x"], batch["y"])
        own, parameters = optimizer.apply(gradients, state["optimizer"], state["parameters"])
        return {"parameters": parameters, "statistics": statistics, "optimizer": own}

    def client_final(shared: tuple[Tree, Tree], state: dict[str, Any]) -> tuple[Tree, Tree]:
        return state["parameters"], state["statistics"]

    return fedjax.for_each_client(client_init, client_step, client_final)


def main() -> None:
    """The work as JSON and the file of inputs on the command line, what came of it on standard output."""
    work = Work(**json.loads(sys.argv[1]))
    parameters, statistics, images, labels = read_inputs(sys.argv[2])
    data = fedjax.InMemoryFederatedData(
        {client: {"x": images[client], "y": labels[client]} for client in range(work.clients)}
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, work.cohort, seed=0)
    train, state, seconds = _trainer(work), (parameters, statistics), []
    for number in range(work.rounds):
        begin = time.perf_counter()
        clients = [
            (
                client,
                dataset.shuffle_repeat_batch(
                    batch_size=work.batch_size, num_steps=work.steps, num_epochs=None, seed=1000 * number + client
                ),
                key,
            )
            for client, dataset, key in sampler.sample()
        ]
        trained = ((output, 1.0) for _, output in train(state, clients))
        state = jax.block_until_ready(fedjax.tree_util.tree_mean(trained))
        seconds.append(time.perf_counter() - begin)
    report(seconds, state[0] | state[1])
