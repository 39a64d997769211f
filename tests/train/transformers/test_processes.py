"""The Trainer in several processes, and in one that is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from helpers.huggingface import Until, ended, made, steps
from helpers.paths import TESTS
from helpers.processes import ranks
from helpers.strategies import same
from helpers.timeouts import PATIENCE
from transformers import Trainer

from shrinkpoint.store.directory import is_checkpoint, read_directory_manifest, verify_directory
from shrinkpoint.train.transformers import ShrinkCallback, ShrinkTrainer, latest_valid

DDP = """
import json, os
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.fingerprint import fingerprint
from helpers.huggingface import Text, ended, gpt2, made
from transformers import Trainer, TrainerCallback

import shrinkpoint as sp
from shrinkpoint.train.transformers import ShrinkConfig, ShrinkCallback, ShrinkTrainer

STORE = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a port that is free


class Apart(TrainerCallback):
    # each rank draws numbers of its own
    def on_train_begin(self, args, state, control, **_):
        if state.global_step == 0:
            torch.manual_seed(args.process_index)


def run(kind, folder, resume=None, callbacks=(), **settings):
    settings |= {"ddp_backend": "gloo", "per_device_train_batch_size": 4, "max_steps": 6}
    trainer = made(kind, folder, trainer_callbacks=[Apart(), *callbacks], **settings)
    return fingerprint(ended(trainer, resume))


def of_rank(rank, width, folder):
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(width), "LOCAL_WORLD_SIZE": str(width),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(STORE.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }
    folder = Path(folder)
    plain = run(Trainer, folder / "plain", save_strategy="no")
    a = folder / "a"
    found = [run(ShrinkTrainer, a, save_total_limit=2)]
    dist.barrier()
    if rank == 0:
        payload = a / "checkpoint-6" / "rank-00000.safetensors"
        payload.write_bytes(payload.read_bytes()[:-9])
    dist.barrier()
    found.append(run(ShrinkTrainer, a, True))  # of the fourth step
    b = folder / "b"
    found.append(run(Trainer, b, save_only_model=True, callbacks=[ShrinkCallback()]))
    found.append(run(Trainer, b, str(b / "checkpoint-4"), save_only_model=True, callbacks=[ShrinkCallback()]))

    def loss(model):
        return model.eval()(**batch).loss

    batch = {name: Text(8, 64).pieces for name in ("input_ids", "labels")}
    scheme = sp.Inshrinkerator(threshold=0.05, evaluate=loss, group=dist.group.WORLD)
    settings = {"trainer_shrink": ShrinkConfig(scheme=scheme), "trainer_model": gpt2(64)}
    wide = run(Trainer, folder / "wide", save_strategy="no", trainer_model=gpt2(64))
    together = run(ShrinkTrainer, folder / "c", **settings) == wide
    import warnings
    warnings.simplefilter("ignore", sp.errors.LossWarning)
    named = {"trainer_shrink": ShrinkConfig("fisher"), "trainer_model": gpt2(64)}
    alone = run(ShrinkTrainer, folder / "d", **named) == wide
    there = sorted(path.name for path in (a / "checkpoint-6").iterdir())
    said = {"plain": plain, "found": found, "there": there, "together": together, "alone": alone}
    (folder / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier()
"""


def test_replicas_agree_on_what_to_resume_and_end_as_without_interruption(tmp_path):
    one, two = ranks(DDP, 2, tmp_path)
    assert one["found"] == [one["plain"]] * 4 and two["found"] == [two["plain"]] * 4
    assert one["plain"] != two["plain"]  # their generators differ
    assert (
        one["together"]
        and two["together"]
        and read_directory_manifest(tmp_path / "c" / "checkpoint-6").loss["searches"]
    )
    assert "rank-00001.safetensors" not in one["there"] and "optimizer.pt" not in one["there"]
    loss = read_directory_manifest(tmp_path / "d" / "checkpoint-2").loss
    assert one["alone"] and two["alone"] and loss["measured_on"] == "the last 2 training batches"
    assert loss["rise"] <= 0.001 * loss["quality"]


KILLED = """
import sys
from pathlib import Path

from helpers.huggingface import made
from transformers import Trainer

from shrinkpoint.train.transformers import ShrinkConfig, ShrinkCallback, ShrinkTrainer

folder, kind, background, resume = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True", sys.argv[4]
settings = {"max_steps": 400, "save_steps": 1, "save_total_limit": 2}
if kind == "trainer":
    trainer = made(ShrinkTrainer, folder, trainer_shrink=ShrinkConfig(background=background), **settings)
else:
    callback = ShrinkCallback(background=background)
    trainer = made(Trainer, folder, trainer_callbacks=[callback], save_only_model=True, **settings)
trainer.train(resume_from_checkpoint=None if resume == "None" else resume)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "background"), [("trainer", True), ("callback", False)])
def test_a_run_that_is_killed_again_and_again_ends_as_the_one_that_was_not(tmp_path, kind, background):
    """Real processes, killed at times of chance; whatever lies there then, a whole checkpoint is among it."""
    run, chance, resume = tmp_path / "run", random.Random(5), None
    for _ in range(4):
        reached = max(steps(run), default=0)
        command = [sys.executable, "-c", textwrap.dedent(KILLED), str(run), kind, str(background), str(resume)]
        environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL) as child:
            deadline = time.monotonic() + PATIENCE
            while max(steps(run), default=0) < reached + 4 and child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(chance.random() * 0.3)
            os.killpg(child.pid, signal.SIGKILL)
        resume = latest_valid(run)
        assert resume is not None and verify_directory(resume, deep=True).step
    last = int(resume.rsplit("-", 1)[1]) + 3
    plain = ended(made(Trainer, tmp_path / "plain", max_steps=400, save_strategy="no", trainer_callbacks=[Until(last)]))
    more = {"save_only_model": True} if kind == "callback" else {}
    callbacks = [Until(last), *([ShrinkCallback()] if kind == "callback" else [])]
    final = made(
        Trainer if kind == "callback" else ShrinkTrainer,
        run,
        max_steps=400,
        save_steps=1,
        trainer_callbacks=callbacks,
        **more,
    )
    assert same(ended(final, resume), plain) and is_checkpoint(run / f"checkpoint-{last}")
