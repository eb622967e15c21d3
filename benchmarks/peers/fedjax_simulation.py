"""The work of ``overhead`` in FedJAX.

- ``fedjax.federated_averaging`` cannot be used: BatchNorm's statistics cannot leave its step. It is reimplemented from
  FedJAX's parts: ``for_each_client``, with any state, ``UniformGetClientSampler``, ``shuffle_repeat_batch`` (seeded
  by round and client, otherwise the same in every round), ``optimizers.sgd`` (optax) and ``tree_util``.
- The back end is FedJAX's default on a CPU, a jitted step called from Python; the other one needs several devices.
- The network is shared with the bare JAX loop. One process on one core.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.peers.jax_network import Tree, jax, loss, read_inputs
from benchmarks.work import Work

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


def simulate(work: Work, inputs: str) -> tuple[list[float], dict[str, Any]]:
    """Do the work."""
    parameters, statistics, images, labels = read_inputs(inputs)
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
    return seconds, state[0] | state[1]
