"""A compressed pipeline whose stages are replicated, sharded or split themselves: two by two processes."""

from __future__ import annotations

import pytest
from helpers.processes import ranks

PROGRAM = """
    import torch
    from helpers.pipeline_model import CPU, MICRO, batches, join, loss_of, parts, same, scheduled, tell
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    from shrinkpoint.comm import compress_pipeline, insert_compression

    HOW = dict(forward="ef21(top25)", backward="q4:64")


    def optimizer(module):
        return torch.optim.SGD(module.parameters(), lr=0.1, foreach=False)


    def run(module, mesh, data, kind="1F1B", micro=MICRO):
        stage = PipelineStage(module, mesh["pp"].get_local_rank(), 2, CPU, group=mesh["pp"].get_group())
        schedule = scheduled(kind, [stage], micro)
        wire = compress_pipeline(schedule, **HOW)
        descent = optimizer(module)
        for x, y in data:
            schedule.step(*([] if stage.is_last else [x]), **({"target": y, "losses": []} if stage.is_last else {}))
            descent.step()
            descent.zero_grad()
        return wire.link_stats()


    def here(models, data, micro=MICRO):
        "Replicas in one process, each with its own points: their gradients are averaged."
        descents = [optimizer(model) for model in models]
        for model in models:
            insert_compression(model, ["0"], micro_batches=micro, **HOW)
        for batch in data:
            for model, (x, y) in zip(models, batch):
                for part, wanted in zip(x.tensor_split(micro), y.tensor_split(micro)):
                    loss_of(model(part), wanted).backward()
            for grads in zip(*(model.parameters() for model in models)):
                mean = sum(one.grad for one in grads) / len(models) / micro
                for one in grads:
                    one.grad = mean.clone() if len(models) > 1 else mean
            for descent in descents:
                descent.step()
                descent.zero_grad()
        return models[0]


    def split(module, mesh):
        return parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


    def full(module):
        return {
            name.removeprefix("module."): one.full_tensor() if hasattr(one, "full_tensor") else one
            for name, one in module.state_dict().items()
        }


    def of_rank(rank, width, folder):
        join(rank, width, folder)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "inner"))
        number, inner = mesh["pp"].get_local_rank(), mesh["inner"]
        data = list(zip(batches(2, seed=1), batches(2, seed=2)))
        mine, reports = [batch[inner.get_local_rank()] for batch in data], {}

        one = here([parts(2), parts(2)], data, 1)[number].state_dict()  # DDP adds micro-batches up in its own way
        replica = DistributedDataParallel(parts(2)[number], process_group=inner.get_group())
        run(replica, mesh, mine, "GPipe", 1)
        reports["replicated"] = same(full(replica), one)

        both = here([parts(2), parts(2)], data)[number].state_dict()
        sharded = parts(2)[number]
        for layer in (sharded[0], sharded[2]):
            fully_shard(layer, mesh=inner)
        fully_shard(sharded, mesh=inner)
        run(sharded, mesh, mine)
        reports["sharded"] = same(full(sharded), both)

        whole = parts(2)
        for stage in whole:
            split(stage, inner)
        one = full(here([whole], [batch[:1] for batch in data])[number])
        pieces = split(parts(2)[number], inner)
        ledgers = run(pieces, mesh, [batch[0] for batch in data])
        reports["split"] = same(full(pieces), one)
        reports["ratio"] = {name: ledger.ratio for name, ledger in ledgers.items()}
        tell(rank, folder, reports)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return ranks(PROGRAM, 4, tmp_path_factory.mktemp("parallel"))


@pytest.mark.parametrize("kind", ["replicated", "sharded", "split"])
def test_stages_that_are_parallel_themselves_are_compressed_alike(reports, kind):
    """DDP, FSDP2 and tensor parallel; every pipeline of stages has its own table at which its ranks agree."""
    assert [one[kind] for one in reports] == [[]] * 4
    assert all(ratio > 2 for one in reports for ratio in one["ratio"].values())
