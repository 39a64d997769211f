"""verl's own workers with our checkpoint engine in place, without Ray's processes.

    python tests/helpers/verl_program.py FOLDER

prints as JSON what two ranks of a rollout have received in three updates.
"""

from __future__ import annotations

import asyncio
import json
import sys

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.utils.import_utils import import_external_libs


class Server:
    """The adapter of a rollout: it keeps what it is given."""

    def __init__(self):
        self.weights, self.names = {}, []

    async def update_weights(self, weights, **options):
        assert options["wire_format"] == "named_tensors"
        received = {name: tensor.clone() async for name, tensor in weights}
        self.weights |= received
        self.names.append(sorted(received))


def make_workers(where):
    """The engines of two ranks of an actor, and two workers of a rollout, the second of which loads in place."""
    actors, rollouts = [], []
    for rank in range(2):
        options = {"bucket_size": 1 << 20, "where": where, "threads": 1}
        actors.append(CheckpointEngineRegistry.new("shrinkpoint", is_master=rank == 0, **options))
        rollout = CheckpointEngineWorker.__new__(CheckpointEngineWorker)
        rollout.checkpoint_engine = CheckpointEngineRegistry.new("shrinkpoint", only_changed=rank == 1, **options)
        rollout.server_adapter = Server()
        rollouts.append(rollout)
    return actors, rollouts


async def update(actors, rollouts, weights, step):
    """What `CheckpointEngineManager` does, in its order."""
    engines = [*actors, *(rollout.checkpoint_engine for rollout in rollouts)]
    metadata = [engine.prepare() for engine in engines]
    topology = CheckpointEngineRegistry.get("shrinkpoint").build_topology(2, 2, metadata)
    for part, kwargs in zip((engines[:2], engines[2:]), topology, strict=True):
        for rank, engine in enumerate(part):
            engine.init_process_group(**{name: values[rank] for name, values in kwargs.items()})
    sends = [actor.send_weights(iter(weights.items()), global_steps=step) for actor in actors]
    receives = [CheckpointEngineWorker.update_weights.__wrapped__(rollout, global_steps=step) for rollout in rollouts]
    metrics = (await asyncio.gather(*receives, *sends))[2:]
    for engine in engines:
        engine.finalize()
    return metrics


if __name__ == "__main__":
    import_external_libs("shrinkpoint.sync.verl")
    actors, rollouts = make_workers(sys.argv[1])
    weights = {"moving": torch.randn(512, 64).bfloat16(), "still": torch.arange(100).float()}
    said = []
    for step in (5, 5, 9):  # a step may be sent again
        weights["moving"][step] += 1
        metrics = asyncio.run(update(actors, rollouts, weights, step))
        equal = [all(torch.equal(x, r.server_adapter.weights[n]) for n, x in weights.items()) for r in rollouts]
        said.append([equal, [r.server_adapter.names[-1] for r in rollouts], metrics])
    print("SAID", json.dumps(said))
