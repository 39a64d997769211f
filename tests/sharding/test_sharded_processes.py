"""Schemes decided by real processes in a real group, which have an FSDP2 model in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.processes import ranks

SETUP = """
    import json, warnings
    from pathlib import Path
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place_of
    from helpers.replica_search import digest, join, leave
    import shrinkpoint as sp
    from shrinkpoint.tensors.info import Role, TensorInfo
    from shrinkpoint.schemes.planner import plan_shards
    from shrinkpoint.schemes.evaluate import ShardedModelEvaluator
    from shrinkpoint.sharding.collectives import make_collectives
    from shrinkpoint.sharding.global_tensors import ShardSpec, ShardLayout
    from shrinkpoint.tensors.flat_state import FlatState
    from shrinkpoint.tensors.info import OptimizerInfo
    from shrinkpoint.tensors.optimizers import MomentKind

    X = torch.arange(150)

    def model_of():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(150, 64), nn.Linear(64, 97), nn.GELU(), nn.Dropout(0.1), nn.Linear(97, 150))

    def evaluate(model):
        model.eval()
        return nn.functional.cross_entropy(model(X), (X * 7 + 3) % 150)

    def trained(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(12):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X), (X * 7 + 3) % 150).backward()
            optimizer.step()
        return optimizer

    def flat_of(model, optimizer):
        tensors, infos, places, optim, kinds = {}, {}, {}, {}, {}

        def put(name, x, role):
            local, offsets = x, (0,) * x.dim()
            if isinstance(x, DTensor):
                local, (_, offsets) = x.to_local(), place_of(x.shape, x.device_mesh, x.placements)
            tensors[name], places[name] = local.detach(), ShardSpec(name, tuple(x.shape), tuple(offsets))
            infos[name] = TensorInfo(name, tuple(local.shape), "F32", role)

        state = model.state_dict()
        for name, parameter in model.named_parameters():
            held = optimizer.state[parameter]
            put(name, state[name], Role.PARAMETER)
            put(f"{name}.exp_avg", held["exp_avg"], Role.MOMENT1)
            put(f"{name}.exp_avg_sq", held["exp_avg_sq"], Role.MOMENT2)
            moments = f"{name}.exp_avg", f"{name}.exp_avg_sq"
            optim[name] = OptimizerInfo(*moments, 12, 1e-2, 0.9, 0.999, 1e-8, 0.01, True, squares=moments[1])
            kinds |= zip(moments, (MomentKind.GRADIENT_MEAN, MomentKind.SQUARE_MEAN))
        return FlatState(None, tensors, infos, optim, kinds), places
"""
FSDP = (
    SETUP
    + """
    def of_rank(rank, width, folder):
        said = join(rank, width, folder)
        mesh, model = init_device_mesh("cpu", (width,)), model_of()
        for layer in (model[1], model[4]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = trained(model)
        base = float(evaluate(model))
        model.train()
        flat, places = flat_of(model, optimizer)
        before = {name: x.clone() for name, x in flat.tensors.items()}
        schemes = {
            "fisher": sp.Fisher(budget="2%", evaluate=evaluate),
            "cnr": sp.CNR(threshold=0.02, evaluate=evaluate),
            "excp": sp.ExCP(),
        }
        for name, scheme in schemes.items():
            evaluates = getattr(scheme, "evaluate", None)
            target = ShardedModelEvaluator(flat, evaluates, model) if evaluates else None
            made = plan_shards(scheme, flat, None, ShardLayout(places, make_collectives()), target)
            said[f"{name} is put back"] = model.training and all(
                torch.equal(x, before[name]) for name, x in flat.tensors.items()
            )
            kept = made.quantize(flat, None)
            if name == "excp":
                continue
            with torch.no_grad():
                for one in target.quantizable:
                    flat.tensors[one].copy_(kept.state.tensors[one])
            [part.reshard() for part in model.modules() if hasattr(part, "reshard")]
            said[name] = [(float(evaluate(model)) - base) / base, kept.loss["chosen"], len(target.quantizable)]
            said[f"{name} said"] = kept.loss.get("rise", 0) if name == "fisher" else kept.loss["degradation"] * base
            with torch.no_grad():
                for one, x in flat.tensors.items():
                    x.copy_(before[one])
            [part.reshard() for part in model.modules() if hasattr(part, "reshard")]
            model.train()
        trained(model)  # goes on
        said["base"] = base
        leave(said, rank, folder)
"""
)
ERRORS = (
    SETUP
    + """
    from shrinkpoint.errors import ShrinkpointError

    def of_rank(rank, width, folder):
        said = join(rank, width, folder)
        model = model_of()
        flat, places = flat_of(model, trained(model))
        mine = {name: x for i, (name, x) in enumerate(flat.tensors.items()) if i % width == rank}
        flat = FlatState(None, mine, {name: flat.infos[name] for name in mine}, {})
        if rank == 1:
            name = next(iter(mine))
            places[name] = ShardSpec(name, tuple(mine[name].shape), (7,) * mine[name].dim())
        try:
            plan_shards(sp.Fisher(ratio=8), flat, None, ShardLayout(places, make_collectives()))
        except ShrinkpointError as error:
            said |= {"class": type(error).__name__, "text": str(error)}
        leave(said, rank, folder)
"""
)


def test_an_fsdp_model_is_measured_in_place_by_all_ranks_and_put_back(tmp_path: Path) -> None:
    first, *others = ranks(FSDP, 2, tmp_path)
    assert others == [first]
    for name in ("fisher", "cnr"):
        degradation, chosen, alive = first[name]
        assert first[f"{name} is put back"] and chosen is not None and alive == 5
        assert degradation <= 0.02 + 1e-6
        assert degradation * first["base"] == pytest.approx(first[f"{name} said"], rel=1e-3, abs=1e-6)
    assert first["excp is put back"]


def test_an_error_of_one_process_is_raised_by_all(tmp_path: Path) -> None:
    for said in ranks(ERRORS, 3, tmp_path):
        assert said["class"] == "StateError" and "a shard within the tensor" in said["text"]
