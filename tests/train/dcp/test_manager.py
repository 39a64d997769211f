"""Promise: a sharded loop is saved and restored as it is, on any number of ranks, and nothing is made up for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.processes import ranks

import shrinkpoint as sp
from shrinkpoint.errors import MismatchError, NotFoundError, PolicyError, StorageError
from shrinkpoint.train import Checkpointer
from shrinkpoint.train.dcp import Manager

RANKS = """
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from helpers.multi_rank_training import Net, digest
    from helpers.replica_search import caught, join, leave
    from shrinkpoint.train.dcp import Manager

    KINDS = {
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=3e-3),
        "momentum": lambda parameters: torch.optim.SGD(parameters, lr=3e-3, momentum=0.9),
    }

    class Loop:
        def __init__(self, mesh, kind, inner=131):
            self.model = Net(inner=inner)
            for layer in (self.model.first, self.model.second, self.model):
                fully_shard(layer, mesh=mesh)
            last, rest = list(self.model.last.parameters()), list(self.model.parameters())[:-2]
            self.optimizer = KINDS[kind]([{"params": last}, {"params": rest, "lr": 1e-3}])
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

        @property
        def objects(self):
            return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

        def train(self, steps):
            for step in range(steps):
                x = torch.randn(16, 48, generator=torch.Generator().manual_seed(step))
                self.model(x).square().mean().backward()
                self.optimizer.step(), self.scheduler.step(), self.optimizer.zero_grad()
            return self

        def state(self):
            with torch.no_grad():
                self.model(torch.zeros(2, 48))  # after which the root has whole parameters
            return digest({name: one.state_dict() for name, one in self.objects.items()})

    def of_rank(rank, width, folder):
        said, mesh = join(rank, width, folder), init_device_mesh("cpu", (width,))
        for kind in KINDS:
            where = f"{folder}/{kind}"
            if width == 2:
                loop, manager = Loop(mesh, kind), Manager(where)
                said[kind] = [manager.restore(**loop.objects)]
                manager.save(0, **loop.objects)
                for step in (1, 2, 3):
                    manager.save(step, metrics={"loss": 1.5}, **loop.train(1).objects)
                said[kind].append(loop.state())
                said[kind].append(manager.last_report and manager.last_report.step)
                said["nothing made up"] = len(Loop(mesh, kind).optimizer.state)
            loop = Loop(mesh, kind)
            if width == 2:
                loop.train(2)
            restored = Manager(where).restore(**loop.objects)
            said[kind + " again"] = [restored.step, dict(restored.metrics), loop.state()]
            if width == 2:
                said[kind + " older"] = Manager(where).restore(2, **loop.objects).step
        before = loop.state()
        wrong = Loop(mesh, "adamw")
        said["absent step"] = caught(lambda: Manager(where).restore(77, **loop.objects))
        said["absent object"] = caught(lambda: Manager(where).restore(**loop.objects, other=nn.Linear(1, 1)))
        said["other sizes"] = caught(lambda: Manager(where).restore(**Loop(mesh, "momentum", inner=9).objects))
        said["other kind"] = caught(lambda: Manager(where).restore(**wrong.objects))
        said["no state"] = caught(lambda: Manager(where).save(9, model=loop.model, other=3))
        said["unchanged"] = loop.state() == before
        leave(said, rank, folder)
"""


def test_a_loop_goes_on_as_it_was_on_any_number_of_ranks(tmp_path: Path):
    reports = ranks(RANKS, 2, tmp_path)
    for rank, report in enumerate(reports):
        for kind in ("adamw", "sgd", "momentum"):
            first, state, saved = report[kind]
            assert first is None and saved == (None if rank else 3)
            assert report[kind + " again"] == [3, {"loss": 1.5}, state]
            assert report[kind + " older"] == 2
        assert report["nothing made up"] == 0 and report["unchanged"]
        errors = {name: report[name][0] for name in ("absent step", "absent object", "other sizes", "other kind")}
        assert errors == {
            "absent step": "NotFoundError",
            "absent object": "MismatchError",
            "other sizes": "MismatchError",
            "other kind": "MismatchError",
        }
        assert report["no state"][0] == "PolicyError"
    names = sorted(path.name for path in (tmp_path / "adamw").iterdir())
    assert names == ["step-000000002", "step-000000003"]  # the newest two
    (tmp_path / "rendezvous").unlink()
    [alone] = ranks(RANKS, 1, tmp_path)
    assert alone["adamw again"] == reports[0]["adamw again"]


OTHER_ORDER = """
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from helpers.master_weights import Layers, MasterAdam
    from helpers.replica_search import caught, join, leave
    from shrinkpoint.train.dcp import Manager

    def loop(mesh, layers, kind, compiled=False):
        model = Layers(layers, torch.bfloat16)
        for layer in model.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        groups = [{"params": list(model[name].parameters()), "lr": len(name) / 10} for name in layers]
        if compiled:
            model["aaa"].compile()
            model["bb"] = torch.compile(model["bb"], backend="eager")
        return model, kind(groups)

    def split(model, kind, *parts):
        return [
            kind([{"params": list(model[name].parameters()), "lr": len(name) / 10} for name in part]) for part in parts
        ]

    def train(model, optimizer):
        for name, parameter in sorted(model.named_parameters()):
            parameter.grad = torch.full_like(parameter, len(name.replace("_orig_mod.", "")) / 3)
        optimizer.step()

    def slots(model, optimizer):
        names = {id(parameter): name.replace("_orig_mod.", "") for name, parameter in model.named_parameters()}

        def local(value):
            if isinstance(value, dict):
                return {key: local(member) for key, member in value.items()}
            if isinstance(value, (list, tuple)):
                return [local(member) for member in value]
            return [str(value.dtype), (value.to_local() if hasattr(value, "to_local") else value).tolist()]

        return {
            names[id(parameter)]: [
                group["lr"],
                local(parameter.detach()),
                local(optimizer.state[parameter]),
            ]
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def of_rank(rank, width, folder):
        said, mesh = join(rank, width, folder), init_device_mesh("cpu", (width,))
        for number, kind in enumerate((torch.optim.Adam, MasterAdam)):
            model, optimizer = loop(mesh, ("aaa", "bb", "c"), kind)
            train(model, optimizer)
            manager = Manager(f"{folder}/{number}")
            manager.save(1, model=model, optimizer=optimizer)
            for name, compiled in (("plain", False), ("compiled", True)):
                other, other_optimizer = loop(mesh, ("c", "aaa", "bb"), kind, compiled)
                manager.restore(model=other, optimizer=other_optimizer)
                said[f"{number} {name}"] = slots(model, optimizer) == slots(other, other_optimizer)
            pair, manager = split(model, kind, ("aaa", "bb"), ("c",)), Manager(f"{folder}/{number} pair")
            for one in pair:
                train(model, one)
            manager.save(1, models={"net": model}, optimizers=pair)
            other, _ = loop(mesh, ("c", "aaa", "bb"), kind, True)
            turned = split(other, kind, ("c",), ("bb", "aaa"))
            manager.restore(models={"net": other}, optimizers=turned)
            said[f"{number} pair"] = [slots(model, one) for one in pair] == [slots(other, one) for one in turned[::-1]]
            manager = Manager(f"{folder}/{number}")
            fewer = kind(list(model["c"].parameters()))
            said[f"{number} fewer"] = caught(lambda: manager.restore(model=model, optimizer=fewer))
        leave(said, rank, folder)
"""


@pytest.mark.parametrize("width", [1, 2])
def test_shards_of_moments_follow_the_names_of_parameters_in_their_dtypes(tmp_path: Path, width: int):
    for report in ranks(OTHER_ORDER, width, tmp_path):
        for number in (0, 1):
            assert report[f"{number} plain"] and report[f"{number} compiled"] and report[f"{number} pair"]
            assert report[f"{number} fewer"][0] == "MismatchError"


def test_a_dict_in_place_of_an_object_is_refused(tmp_path: Path):
    with pytest.raises(PolicyError, match="Pass plain values and tensors in an object that has these methods"):
        Manager(tmp_path).save(1, extra={"epoch": 3})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_load_reads_the_newest_checkpoint_of_a_run_and_that_of_a_step(tmp_path: Path):
    """The directories have the names of a store's, which has no checkpoint there."""
    model = torch.nn.Linear(8, 8)
    manager, weights = Manager(tmp_path), {}
    for step in (1, 2):
        torch.nn.init.normal_(model.weight)
        manager.save(step, model=model)
        weights[step] = model.weight.detach().clone()
    assert torch.equal(sp.load(tmp_path)["model.weight"], weights[2])
    assert torch.equal(sp.load(tmp_path, step=1)["model.weight"], weights[1])
    with pytest.raises(NotFoundError, match="no checkpoint of step 3; expected one of 1, 2"):
        sp.load(tmp_path, step=3)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_directory_of_torchs_own_checkpoints_is_neither_overwritten_nor_taken_for_an_empty_one(tmp_path):
    model = torch.nn.Linear(3, 2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "step-000000001", no_dist=True)
    stock = {path.name: path.read_bytes() for path in (tmp_path / "step-000000001").iterdir()}
    manager = Manager(tmp_path, keep=1)
    for call in (
        lambda: manager.restore(model=model),
        lambda: manager.restore(1, model=model),
        lambda: manager.save(1, model=model),
    ):
        with pytest.raises(MismatchError, match=r"step-000000001: .*torch.distributed.checkpoint's own writer"):
            call()
    for step in (2, 3):
        manager.save(step, model=model)
    assert manager.restore(model=model).step == 3 and manager.steps() == [3]
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-000000001").iterdir()} == stock


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_store_and_a_run_write_nothing_over_each_other(tmp_path):
    model = torch.nn.Linear(3, 2)
    with sp.CheckpointManager(tmp_path / "store") as store:
        store.save(1, model=model)
        manager = Manager(tmp_path / "store", keep=1)
        for call in (lambda: manager.restore(model=model), lambda: manager.save(1, model=model)):
            with pytest.raises(MismatchError, match=r"step-000000001: a checkpoint in a store"):
                call()
        with pytest.raises(MismatchError, match=r"step-000000001: a checkpoint in a store"):
            Checkpointer().save(tmp_path / "store" / "step-000000001", model.state_dict())
        for step in (2, 3):
            manager.save(step, model=model)
        assert store.restore(model=model).step == 1 and store.store.verify(deep=True) == []
    Manager(tmp_path / "run").save(1, model=model)
    with sp.CheckpointManager(tmp_path / "run") as store:
        for call in (lambda: store.restore(model=model), lambda: store.save(1, model=model)):
            with pytest.raises(MismatchError, match=r"run: the run of a framework, with step-000000001"):
                call()
    store = sp.CheckpointManager(tmp_path / "other", mirror=tmp_path / "run")
    with pytest.warns(UserWarning, match="is behind: .*run: the run of a framework"):
        store.save(1, model=model)
        with pytest.raises(StorageError, match="the run of a framework, with step-000000001"):
            store.close()
    assert Manager(tmp_path / "run").restore(model=model).step == 1
