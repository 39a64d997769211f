"""Promise: the split model in one process has the bits of real ranks with torch's tensor parallelism."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch
from helpers.paths import REPOSITORY
from helpers.processes import ranks

from shrinkpoint_lab.demo.workload import GPT, GPTConfig

SHAPE = {"layers": 2, "width": 64, "heads": 4, "context": 32, "dropout": 0.0}

PROGRAM = """
    import sys
    import torch
    from helpers.paths import REPOSITORY
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    import tensor_parallel_model
    from helpers.replica_search import digest, join, leave
    from shrinkpoint.comm import compress_tensor_parallel
    from tensor_parallel_model import GPTConfig, Messages, gpt, plan_of_blocks, split
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    def model(shape):
        torch.manual_seed(0)
        return gpt(GPTConfig(**shape))

    def trained(model):
        optimizer, generator = torch.optim.SGD(model.parameters(), lr=0.5), torch.Generator().manual_seed(5)
        for _ in range(3):
            text = torch.randint(0, 256, (4, 33), generator=generator)
            model(text[:, :-1].contiguous(), text[:, 1:].contiguous()).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = model.state_dict()
        return digest(*(one.full_tensor() if isinstance(one, DTensor) else one for one in state.values()))

    def of_rank(rank, width, folder):
        reports, mesh = join(rank, width, folder), init_device_mesh("cpu", (width,))
        for forward, backward in (("q8:64", "q8:64"), ("q4:64", ""), ("", "n4:64")):
            handle = compress_tensor_parallel(plan_of_blocks("blocks.*"), forward or None, backward or None)
            real = parallelize_module(model(SHAPE), mesh, handle.plan)
            one = split(model(SHAPE), Messages(width, forward), Messages(width, backward))
            reports[f"{forward}, {backward}"] = [trained(real), trained(one)]
        leave(reports, rank, folder)
"""


@pytest.fixture(scope="module")
def split_model() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        return importlib.import_module("tensor_parallel_model")


def test_real_ranks_have_the_bits_of_the_split_model(tmp_path) -> None:
    for report in ranks(f"SHAPE = {SHAPE}\n" + PROGRAM.replace("\n    ", "\n"), 2, tmp_path):
        assert len({real for real, _ in report.values()}) == 3
        for real, one in report.values():
            assert real == one


def test_without_messages_it_computes_what_the_demo_does(split_model: ModuleType) -> None:
    torch.manual_seed(0)
    plain = GPT(GPTConfig(**SHAPE))
    state = plain.state_dict()
    for ranks_of_split in (1, 2, 4):
        messages = split_model.Messages(ranks_of_split, "")
        model = split_model.split(split_model.gpt(GPTConfig(**SHAPE), state), messages, messages)
        text = torch.arange(66).view(2, 33)
        batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        losses = [one(*batch) for one in (plain, model)]
        for loss in losses:
            loss.backward()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
        for one, other in zip((plain.token, plain.norm), (model.token, model.norm), strict=True):
            assert torch.allclose(one.weight.grad, other.weight.grad, atol=1e-6)
        plain.zero_grad()
