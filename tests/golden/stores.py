"""Writes the golden stores and checkpoint directories; `make.py` says when."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from helpers.codebooks import Rounding
from helpers.fingerprint import fingerprint
from helpers.processes import run_forked
from helpers.round_trip import Loop
from helpers.strategies import difference

import shrinkpoint as sp
from shrinkpoint.codec.reference import Reference
from shrinkpoint.errors import LossWarning
from shrinkpoint.sync import Publisher
from shrinkpoint.tensors.flat_state import flatten, unflatten
from shrinkpoint.train import Checkpointer
from shrinkpoint.train.dcp import Writer, load


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def write_store(place: Path) -> dict[str, str]:
    """A store with two chains and a forgotten step; fingerprints by step."""
    expected = {}
    loop = Loop(width=4)
    with sp.Store(place, keyframe_every=3) as store:
        for step in (1, 2, 3, 4):
            state = loop.steps(1)
            store.save(step, state, metrics={"val_loss": 1 / step, "nan": float("nan")})
            expected[str(step)] = fingerprint(state)
        store.forget(2)
    (place / ".shrinkpoint-lock").unlink(missing_ok=True)
    return expected


@contextmanager
def lossy_store(place: Path, forgotten: int) -> Iterator[sp.Store]:
    """A store of lossy checkpoints in one chain; at the end a step is forgotten and what stands on it written again."""
    with warnings.catch_warnings(), sp.Store(place, keyframe_every=9) as store:
        warnings.simplefilter("ignore", LossWarning)
        yield store
        store.forget(forgotten)
        store.compact()
    (place / ".shrinkpoint-lock").unlink(missing_ok=True)


def write_lossy_store(place: Path) -> dict[str, str]:
    """A store whose checkpoints are lossy, but for one in the middle, with one that was written again."""
    expected = {}
    loop, scheme = Loop(width=4), Rounding(loss={"chosen": {"bins": 8}, "degradation": 0.01, "worst": float("nan")})
    with lossy_store(place, forgotten=4) as store:
        for step in (1, 2, 3, 4, 5):
            state = {"model": loop.steps(1)["model"]}
            lossy = step != 3
            store.save(step, state, scheme=scheme if lossy else "lossless", lossy_restores=step // 4)
            expected[str(step)] = fingerprint(scheme.expected(state) if lossy else state)
    return expected


def write_tracked_store(place: Path) -> dict[str, str]:
    """A store whose deltas are differences to what a reader has, with one that was written again."""
    expected: dict[str, Any] = {}
    weight, scheme, held = randn(64, 64).bfloat16().float(), sp.LCCheckpoint(bits=3), None
    with lossy_store(place, forgotten=3) as store:
        for step in (1, 2, 3, 4):
            state = {"model": {"w.weight": weight + (step - 1) * 1e-3 * randn(64, 64, seed=step)}}
            kept = scheme.quantize(flatten(state), held).state
            held = Reference(kept.tensors)
            expected[str(step)] = fingerprint(unflatten(kept.tree, kept.tensors))
            store.save(step, state, scheme=scheme)
    return expected


def write_fisher_store(place: Path) -> dict[str, str]:
    """A store of points, with a restore in the middle and one checkpoint that was written again."""
    expected: dict[str, Any] = {}
    loop, scheme = Loop(width=6), sp.Fisher(relative_error=0.1)
    with lossy_store(place, forgotten=3) as store:
        for step in (1, 2, 3, 4):
            state, restores = loop.steps(2), step // 3
            scheme.resume(store.manifest(step - 1).loss if step > 1 else None, restores)
            store.save(step, state, scheme=scheme, lossy_restores=restores)
            assert store.reference is not None
            flat = flatten(state)
            expected[str(step)] = fingerprint(unflatten(flat.tree, dict(store.reference.tensors)))
    return expected


def write_weights_store(place: Path) -> dict[str, str]:
    """A store whose older checkpoints have weights only, with a prune that has written two chains again."""
    expected, loop = {}, Loop(width=4)
    with sp.Store(place, keyframe_every=4) as store:
        for step in range(1, 8):
            state = loop.steps(1)
            store.save(step, state)
            state["optimizer"]["state"] = state["optimizer"]["state"] if step > 6 else {}
            expected[str(step)] = fingerprint(state)
        plan = store.prune(sp.Keep(moments_last=1), dry_run=False)
        assert plan.weights_only == (1, 2, 3, 4, 5, 6)
        store.forget(2)
    (place / ".shrinkpoint-lock").unlink(missing_ok=True)
    return expected


def write_returned_store(place: Path) -> dict[str, str]:
    """A run that went back from step 4 to step 2, saved step 3 again, and left step 4 behind."""
    expected, torch_model = {}, torch.nn.Linear(12, 8)
    with sp.CheckpointManager(place, keyframe_every=3) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # step 3 is below step 4
        for save, step in enumerate((1, 2, 3, 4, 3, 5)):
            if save == 4:
                manager.restore(2, model=torch_model)
            torch_model.weight.data = torch_model.weight.data + 1e-3 * randn(8, 12, seed=save)
            manager.save(step, model=torch_model, rng=False)
            expected[str(step)] = fingerprint(manager.store.load(step))
        assert manager.store.manifest(5).abandoned
    (place / ".shrinkpoint-lock").unlink(missing_ok=True)
    return expected


def write_directories(place: Path) -> dict[str, dict[str, str]]:
    """A chain of three, of which the first has been deleted; fingerprints by folder."""
    expected, loop = {}, Loop(width=4)
    with Checkpointer(keyframe_every=3) as trail:
        for step in (1, 2, 3):
            state = loop.steps(1)
            trail.save(place / f"checkpoint-{step}", state, step=step, metrics={"loss": float("nan")}, extra={"a": [1]})
            expected[f"checkpoint-{step}"] = fingerprint(state)
        trail.discard(place / "checkpoint-1")
    del expected["checkpoint-1"]
    return expected


def write_shards(place: Path) -> dict[str, dict[str, str]]:
    """Two checkpoints of one rank, with values that are no tensors; fingerprints by folder."""
    expected, loop = {}, Loop(width=4)
    for step in (1, 2):
        model = loop.steps(1)["model"]
        state = {"model": model, "more": {"epoch": step, "names": ["a", "b"], "scalar": torch.tensor(step)}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that there is one process
            dcp.save(state, storage_writer=Writer(place / f"step-{step}"), no_dist=True)
        read = load(place / f"step-{step}")
        assert difference(read, state) is None
        expected[f"step-{step}"] = fingerprint(read)
    return expected


def published_states() -> dict[int, dict[str, torch.Tensor]]:
    """States by version."""
    states, state = {}, {"w": randn(40, 30).bfloat16(), "b": randn(30), "n": torch.tensor(0)}
    for version in (2, 3, 5, 8):
        states[version] = state = {"w": state["w"] * 1.01, "b": state["b"] + 0.001, "n": state["n"] + 1}
    return states


def write_published(place: Path) -> dict[str, str]:
    """Versions of published weights: the oldest deltas are gone, and one version has a keyframe besides; by version."""
    expected = {}
    with Publisher(place, keep=1, threads=1) as publisher:
        for version, state in published_states().items():
            publisher.publish(state, version=version, keyframe=version == 5)
            expected[str(version)] = fingerprint(state)
    Publisher(place).close()  # which removes what is dropped
    (place / ".shrinkpoint-lock").unlink(missing_ok=True)
    return {version: expected[version] for version in [*expected][-1:]}


PARTS = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from golden.stores import published_states
from shrinkpoint.sync import Publisher

def of_rank(rank, width, folder, place):
    dist.init_process_group("gloo", init_method=f"file://{folder}/join", rank=rank, world_size=width)
    mesh = init_device_mesh("cpu", (width,))
    with Publisher(place, ranks=dist.group.WORLD, keep=1, threads=1) as publisher:
        for version, state in published_states().items():
            sharded = {name: distribute_tensor(x, mesh, [Shard(0)]) if x.dim() else x for name, x in state.items()}
            publisher.publish(sharded | {"tied": sharded["b"]}, version=version, keyframe=version == 5)
"""


def write_published_parts(place: Path) -> dict[str, str]:
    """The same versions in parts of two ranks, with a tied tensor."""
    with tempfile.TemporaryDirectory() as folder:
        run_forked(PARTS, folder, str(place), width=2)
    Publisher(place).close()
    (place / ".shrinkpoint-lock").unlink(missing_ok=True)
    version, state = [*published_states().items()][-1]
    return {str(version): fingerprint(state | {"tied": state["b"]})}


STORES: dict[str, Callable[[Path], dict[str, str]]] = {
    "store": write_store,
    "lossy_store": write_lossy_store,
    "tracked_store": write_tracked_store,
    "fisher_store": write_fisher_store,
    "weights_store": write_weights_store,
    "returned_store": write_returned_store,
}
RUNS: dict[str, Callable[[Path], dict[str, dict[str, str]]]] = {"folders": write_directories, "shards": write_shards}
PUBLISHED: dict[str, Callable[[Path], dict[str, str]]] = {
    "weights": write_published,
    "parts": write_published_parts,
}
