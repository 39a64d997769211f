"""Every block of Python in the documents runs: those with prompts as doctests, the others here.

The latter show a part of a program; what it takes from the rest is here, as small as it can be.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from helpers.documents import ROOT, all_blocks, run_plain_blocks
from helpers.processes import run_forked
from torch import Tensor, nn
from typer.testing import CliRunner

import shrinkpoint as sp
from shrinkpoint.cli.app import app
from shrinkpoint.train import RankShard

pytestmark = pytest.mark.filterwarnings("ignore")  # of these sizes frameworks and schemes say much
BLOCKS = all_blocks()
PLAIN_PAGES = sorted({block.page for block in BLOCKS if block.language == "python" and not block.has_prompts})
WIRE_PAGES = {"docs/wire.md", "docs/wire_design.md", "docs/elastic.md"}
PAGES_OF_COMMANDS = {"docs/convert.md", "docs/moving.md"}
"""Pages whose commands work on what their Python blocks have saved."""
FRAMEWORK_PAGES = {"README.md", "docs/accelerate.md", "docs/lightning.md", "docs/torchtitan.md", "docs/vllm.md"}


class Tiny(nn.Module):
    """A model with the names that patterns in the documents match."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x)  # type: ignore[no-any-return]


TOKENS, LABELS = torch.arange(64) * 7 % 512, torch.arange(64) % 8


def loss_on(model: nn.Module, batch: Any = None) -> Tensor:
    return nn.functional.cross_entropy(model(TOKENS), LABELS, reduction="none")


def trained() -> dict[str, Any]:
    """A model and its optimizer, after a step."""
    torch.manual_seed(0)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_on(model).mean().backward()
    optimizer.step()
    return {"sp": sp, "torch": torch, "model": model, "optimizer": optimizer, "step": 1}


def evaluate_state(state: Mapping[str, Tensor]) -> Tensor:
    model = Tiny()
    model.load_state_dict(state)
    return loss_on(model)


def schemes(number: int) -> dict[str, Any]:
    if number:
        return {}
    functions = {"loss_on": loss_on, "evaluate_state": evaluate_state, "RankShard": RankShard}
    return {**trained(), **functions, "inputs": TOKENS, "labels": LABELS, "held_out": None}


def runs(number: int) -> dict[str, Any]:
    """A loop on a group of one rank."""
    return {
        **trained(),
        "DistributedDataParallel": nn.parallel.DistributedDataParallel,
        "steps": 2,
        "ranks": 1,
        "rank": 0,
    }


def home(number: int) -> dict[str, Any]:
    """A loop, and the Trainer's model and data."""
    from helpers.huggingface import Text, arguments, gpt2

    return trained() if number == 0 else {"model": gpt2(), "args": arguments(Path("run")), "data": Text()}


def journal(number: int) -> dict[str, Any]:
    """A model whose gradients DDP averages, in a group of one rank."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    names = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "loss_function": nn.functional.mse_loss}
    names |= {"last_step": 3, "batch_of": lambda step: (torch.ones(3, 4) * step, torch.ones(3, 2))}
    from torch.distributed.fsdp import fully_shard

    shards = fully_shard(nn.Linear(4, 2))
    names |= {"sharded_model": shards, "sharded_update": torch.optim.AdamW(shards.parameters()).step}
    return {"sp": sp, "torch": torch, "ddp_model": model, "optimizer": optimizer, **names}


SETUPS: dict[str, Callable[[int], dict[str, Any]]] = {
    "docs/index.md": home,
    "docs/journal.md": journal,
    "docs/runs.md": runs,
    "docs/schemes.md": schemes,
}
"""What the blocks of a page take from the reader's own program; a page that is not here needs nothing."""


@pytest.mark.parametrize("page", [page for page in PLAIN_PAGES if page not in WIRE_PAGES | FRAMEWORK_PAGES])
def test_blocks_without_prompts_run(page, tmp_path, monkeypatch, request, single_rank_group):
    monkeypatch.chdir(tmp_path)
    if page == "docs/object_storage.md":
        request.getfixturevalue("s3")
    run_plain_blocks(page, SETUPS.get(page, lambda number: {}), commands=page in PAGES_OF_COMMANDS)


def test_the_ten_lines_print_the_ratios_that_readme_states(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    block = next(block for block in BLOCKS if block.page == "README.md" and block.language == "python")
    low, high = map(int, re.findall(r"(\d+)x", block.text.split("# prints ")[1].split("\n")[0]))
    torch.manual_seed(0)
    block.run({})
    ratios = [int(ratio) for ratio in re.findall(r"(\d+)x smaller", capsys.readouterr().out)]
    assert len(ratios) == 6
    assert 0.75 * low <= min(ratios) and max(ratios) <= 1.25 * high  # the range is one over eight seeds


WIRE = """
    import os, warnings
    from collections import OrderedDict
    import torch
    import torch.distributed as dist
    from helpers.documents import run_plain_blocks
    from helpers.pipeline_model import batches, build, join, loss_of, parts
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from torchft.coordination import LighthouseServer

    def of_rank(rank, width, folder):
        warnings.simplefilter("ignore")
        join(rank, width, folder)
        os.environ["LOCAL_WORLD_SIZE"] = str(width)

        def setup(number):
            model = parts(1)
            perceptron = nn.Sequential(OrderedDict(up=nn.Linear(8, 16), down=nn.Linear(16, 8)))
            names = {"schedule": build("GPipe", rank, width, width)[0]}
            names |= {"ddp_model": DistributedDataParallel(parts(1)), "sharded_model": fully_shard(parts(1))}
            names |= {"perceptron": perceptron, "mesh": init_device_mesh("cpu", (width,)), "rows": torch.ones(64, 8)}
            names |= {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
            return names | {"batches": batches(30, seed=rank), "loss_function": loss_of}

        # The group exists already: the program that the guide begins with joins and leaves none.
        dist.init_process_group = dist.destroy_process_group = lambda *args: None
        after = run_plain_blocks("docs/wire.md", setup)
        assert after["local"].round == 1
        after = run_plain_blocks("docs/wire_design.md", setup)
        assert after["compressed"].link_stats["forward"].messages > 0

        # torchrun and torchft_lighthouse give these to a replica.
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=width) if rank == 0 else None
        address = [lighthouse and lighthouse.address()]
        dist.broadcast_object_list(address)
        replica = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {**replica, "TORCHFT_LIGHTHOUSE": address[0]}
        after = run_plain_blocks("docs/elastic.md", setup)
        assert after["local"].round == 1
"""


def test_blocks_about_the_wire_run_on_two_ranks(tmp_path):
    pytest.importorskip("torchft")
    run_forked(WIRE, str(tmp_path), width=2)


def test_the_lines_for_every_trainer_run(tmp_path, monkeypatch, single_rank_group):
    import accelerate
    import lightning
    import transformers
    from helpers.huggingface import Text, arguments, gpt2
    from torch.distributed import checkpoint
    from torch.nn.parallel import DistributedDataParallel

    from shrinkpoint.comm import compress_ddp
    from shrinkpoint.train.accelerate import save_state
    from shrinkpoint.train.dcp import Writer
    from shrinkpoint.train.lightning import ShrinkIO, ShrinkIOCallback
    from shrinkpoint.train.transformers import ShrinkConfig, ShrinkTrainer

    monkeypatch.chdir(tmp_path)
    args = arguments(Path("run"))
    ShrinkTrainer(gpt2(), args, train_dataset=Text()).train()
    accelerator = accelerate.Accelerator(
        project_config=accelerate.utils.ProjectConfiguration("runs/readme", automatic_checkpoint_naming=True)
    )
    prepared = accelerator.prepare(nn.Linear(64, 64))
    imports = [ShrinkTrainer, ShrinkConfig, ShrinkIO, ShrinkIOCallback, Writer, save_state, compress_ddp]
    names = {imported.__name__: imported for imported in imports}
    names |= {"model": gpt2(), "args": args, "data": Text(), "lightning": lightning, "accelerator": accelerator}
    names |= {"dcp": checkpoint, "state": {"w": torch.ones(99)}, "path": "runs/dcp", "loss": loss_on}
    names |= {"ddp_model": DistributedDataParallel(nn.Linear(64, 64)), "config": SimpleNamespace()}
    titan = MagicMock() if find_spec("torchtitan") is None else sp.train.torchtitan
    names["TitanCheckpointManager"] = titan.TitanCheckpointManager
    after = run_plain_blocks("README.md", lambda number: names)
    assert isinstance(after["model"], transformers.GPT2LMHeadModel)
    run_plain_blocks("docs/accelerate.md")
    run_plain_blocks("docs/lightning.md")
    assert prepared.weight.isfinite().all()


def test_the_configuration_for_torchtitan_is_one(monkeypatch):
    pytest.importorskip("torchtitan")
    for name in ("datasets", "datasets.distributed", "torch.utils.tensorboard"):  # which torchtitan imports
        monkeypatch.setitem(sys.modules, name, MagicMock())
    run_plain_blocks("docs/torchtitan.md")


def test_trainer_makes_one_call_to_a_vllm_server_for_each_version(tmp_path, monkeypatch):
    """vLLM's client is recorded here: tests/sync/test_vllm.py has a real server."""
    monkeypatch.chdir(tmp_path)
    client = MagicMock()
    vllm = SimpleNamespace(HTTPVLLMWeightSyncClient=lambda url: client)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.distributed", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", vllm)
    run_plain_blocks("docs/vllm.md", lambda number: {"model": Tiny(), "train": lambda: None})
    assert client.init_weight_transfer_engine.call_args.args == ({"where": str(tmp_path / "weights")},)
    assert [call.args[0] for call in client.update_weights.call_args_list] == [{"version": n} for n in range(3)]
    assert [call.args[0] for call in client.finish_weight_update.call_args_list] == ["0", "1", "2"]


# ---- commands --------------------------------------------------------------------------------------------------------

COMMANDS = [
    (block, line.split(" #")[0])
    for block in BLOCKS
    if block.language != "python"
    for line in block.text.splitlines()
    if line.startswith("shrinkpoint ")
]


@pytest.mark.parametrize("block, line", [pytest.param(*pair, id=f"{pair[0].page}: {pair[1]}") for pair in COMMANDS])
def test_commands_and_options_exist(block, line):
    _, name, *words = shlex.split(line)
    help_text = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert options <= {*re.findall(r"--[a-z-]+", help_text)}, f"{block.page}:{block.line}"


def test_the_commands_of_the_tutorial_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with sp.Store("runs/tutorial") as store:
        for step in (100, 110, 111):
            store.save(step, {"model": Tiny().state_dict()})
    lines = [line for block, line in COMMANDS if block.page == "docs/tutorial.md"]
    assert [line.split()[1] for line in lines] == ["list", "show", "report", "verify"]
    for line in lines:
        ran = CliRunner().invoke(app, shlex.split(line)[1:])
        assert ran.exit_code == 0, ran.output


def test_no_example_stands_outside_of_a_block():
    """GitHub and the site would show it as a quotation of a quotation."""
    for page in ROOT.glob("docs/**/*.md"):
        text = re.sub(r"(?ms)^```.*?^```$|<!--.*?-->", "", page.read_text())
        assert not re.search(r"(?m)^>>> ", text), page.name
