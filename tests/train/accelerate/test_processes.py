"""Accelerate on real processes: all of them go on exactly, and none goes on where another failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import accelerate_runs
from helpers.accelerate_runs import Loop
from helpers.processes import ranks

from shrinkpoint.train.accelerate import load_state

COMMON = """
    import json, os, pathlib, warnings
    import torch, torch.distributed as dist
    from helpers import accelerate_runs
    from helpers.accelerate_runs import Counter, Loop
    from shrinkpoint.errors import ShrinkpointError
    from shrinkpoint.schemes import Inshrinkerator
    from shrinkpoint.store import directory as directories
    from shrinkpoint.train.accelerate import AcceleratorCheckpointer, load_state, save_state, wait

    class Stubborn(Counter):
        def state_dict(self):
            return {"of": object()}

    def caught(work):
        try:
            work()
        except ShrinkpointError as error:
            return [type(error).__name__, str(error)]

    def join(rank, width, folder):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(width), LOCAL_WORLD_SIZE=str(width))
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=width)
        return pathlib.Path(folder)

    def tell(folder, rank, said):
        (folder / f"{rank}.json").write_text(json.dumps(said))
        dist.barrier()
        os._exit(0)  # taking models of DDP apart once their group is gone can hang in torch

"""

REPLICAS = (
    COMMON
    + """
    def of_rank(rank, width, folder):
        folder, said = join(rank, width, folder), {}
        runs = folder / "runs"
        first = Loop(runs)
        shrink = AcceleratorCheckpointer(first.accelerator, background=True)
        first.epoch()
        shrink.save_state()
        first.epoch(stop=4)
        shrink.save_state()
        saved = first.state()
        shrink.wait()
        first.epoch(skip=4).epoch()
        said["numbers"] = [torch.get_rng_state().sum().item(), saved == first.state()]

        accelerate_runs.forget()
        second = Loop(runs, seed=9)
        said["folder"] = load_state(second.accelerator).directory.name
        said["restored"] = second.state() == saved
        second.epoch(skip=4).epoch()
        said["continued"] = second.state() == first.state()

        second.accelerator._custom_objects[0] = Stubborn() if rank == 1 else Counter()
        said["refused"] = caught(lambda: save_state(second.accelerator))
        second.accelerator._custom_objects[0] = second.counter
        save_state(second.accelerator)
        if rank == 0:
            newest = runs / "checkpoints/checkpoint_2/rank-00000.safetensors"
            data = bytearray(newest.read_bytes())
            data[-9] ^= 1
            newest.write_bytes(data)
        accelerate_runs.forget()
        third = Loop(runs, seed=4)
        resumed = load_state(third.accelerator)
        skipped = [entry.directory.name for entry in resumed.skipped]
        said["older"] = [resumed.directory.name, skipped, third.state() == saved]

        inputs = torch.randn(16, 16, generator=torch.Generator().manual_seed(rank))

        def evaluate(model):
            if broken and rank == 1:
                raise ValueError("boom")
            return model.eval()(inputs).square().mean()

        broken, before = False, third.state()
        scheme = Inshrinkerator(threshold=0.5, evaluate=evaluate, group=dist.group.WORLD)
        shrink = AcceleratorCheckpointer(third.accelerator, scheme=scheme)
        report = shrink.save_state()
        said["searched"] = [report is None, str(scheme._last_choice), third.state() == before]
        broken = True
        shrink.save_state()
        said["boom"] = third.state() == before
        manifest = shrink.load_state().manifest
        said["exact"] = [manifest.scheme, manifest.is_lossy, manifest.loss["exact"]]
        tell(folder, rank, said)
"""
)

SHARDS = (
    COMMON
    + """
    import shutil
    from shrinkpoint.schemes import Fisher
    from shrinkpoint.store import Keep

    def near(a, b):
        a, b = (torch.frombuffer(bytearray(x), dtype=torch.float32) for x in (a, b))
        return ((a - b).norm() / b.norm()).item()

    def of_rank(rank, width, folder):
        folder, said = join(rank, width, folder), {}
        runs = folder / "runs"
        first = Loop(runs, limit=2, sharded=True)
        shrink = AcceleratorCheckpointer(first.accelerator)
        for _ in range(3):
            first.epoch()
            shrink.save_state()
        first.epoch(stop=4)
        saved = first.state()
        shrink.save_state()
        said["weights"] = [x.full_tensor().double().sum().item() for x in first.model.state_dict().values()]
        said["moments"] = [x["exp_avg"].full_tensor().double().sum().item() for x in first.optimizer.state.values()]
        first.epoch(skip=4).epoch()
        places = runs / "checkpoints"
        said["left"] = sorted(path.name for path in places.iterdir())
        dist.barrier()  # before anyone deletes what is listed
        if rank == 0:
            shutil.rmtree(places / "checkpoint_2")
        dist.barrier()

        accelerate_runs.forget()
        second = Loop(runs, seed=9, sharded=True)
        said["folder"] = load_state(second.accelerator).directory.name
        said["restored"] = second.state() == saved
        second.epoch(skip=4).epoch()
        said["continued"] = second.state() == first.state()

        save_state(second.accelerator, background=True)  # a delta against what was loaded
        saved = second.state()
        second.epoch()
        wait(second.accelerator)
        manifest = directories.verify_directory(places / "checkpoint_4", deep=True)
        said["deltas"] = [len(one.bases) for one in manifest.payloads]
        dist.barrier()
        if rank == 1:
            (places / "checkpoint_5").mkdir()  # a save that was killed
        dist.barrier()
        resumed = load_state(second.accelerator)
        skipped = [entry.directory.name for entry in resumed.skipped]
        said["passed"] = [resumed.directory.name, skipped, second.state() == saved]

        if rank == 1:
            (places / "checkpoint_5").rmdir()
        dist.barrier()
        saved = second.state()
        second.accelerator.save_state()
        second.epoch()
        resumed = load_state(second.accelerator)
        said["stock"] = [resumed.directory.name, second.state()[:-1] == saved[:-1]]

        lossy = AcceleratorCheckpointer(second.accelerator, scheme=Fisher(relative_error=0.1))
        lossy.save_state(metrics={"loss": 1.5})
        again = lossy.load_state().manifest
        said["lossy"] = [again.scheme, again.is_lossy, again.step, again.metrics, lossy.load_state().directory.name]
        said["near"] = near(second.state()[0], saved[0])

        second.accelerator._custom_objects[0] = Stubborn() if rank == 1 else Counter()
        said["refused"] = caught(lambda: save_state(second.accelerator))
        second.accelerator.register_for_checkpointing(Counter())
        said["others"] = caught(lambda: load_state(second.accelerator, places / "checkpoint_4"))

        accelerate_runs.forget()
        third, places = Loop(folder / "third", sharded=True), folder / "third/checkpoints"
        rules = {"keep": Keep(last=3, moments_last=1), "keyframe_every": 2}
        with AcceleratorCheckpointer(third.accelerator, background=True, **rules) as retaining:
            for _ in range(5):
                retaining.save_state()
                saved = third.state()
                third.epoch()
        kept = [directories.verify_directory(path, deep=True) for path in sorted(places.iterdir())]
        said["kept"] = [[one.step, one.weights_only, len(one.payloads)] for one in kept]
        said["moments gone"] = caught(lambda: load_state(third.accelerator, places / "checkpoint_2"))
        said["newest"] = [retaining.load_state().directory.name, third.state() == saved]
        tell(folder, rank, said)
"""
)

SPLIT = (
    COMMON
    + """
    from accelerate import Accelerator
    from shrinkpoint.schemes import Fisher

    def make(seed, width=4):
        accelerate_runs.forget()
        torch.manual_seed(seed)
        accelerator = Accelerator(cpu=True)
        accelerate_runs.spread(accelerator)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, width))
        adamw = torch.optim.AdamW(model[0].parameters(), lr=0.01)
        sgd = torch.optim.SGD(model[1].parameters(), lr=0.01, momentum=0.9)
        return accelerator, *accelerator.prepare(model, adamw, sgd)

    def step(accelerator, model, *optimizers):
        accelerator.backward(model(torch.ones(2, 8)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return [weight.full_tensor().tolist() for weight in model.parameters()]

    def of_rank(rank, width, folder):
        folder = join(rank, width, folder)
        run = make(0)
        step(*run)
        save_state(run[0], folder / "run")
        expected = step(*run)
        again = make(1)
        load_state(again[0], folder / "run")
        said = {"continued": step(*again) == expected}
        measured = Fisher(budget="1%", evaluate=lambda model: model(torch.ones(2, 8)).square().mean().item())
        with AcceleratorCheckpointer(run[0], scheme=measured, background=True) as checkpointer:
            checkpointer.save_state(folder / "measured")
            checkpointer.save_state(folder / "measured again")
        said["schemes"] = [directories.read_directory_manifest(folder / name).scheme
                           for name in ("measured", "measured again")]
        said["shape"] = caught(lambda: load_state(make(0, width=6)[0], folder / "run"))
        tell(folder, rank, said)
"""
)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], Path]:
    folder = tmp_path_factory.mktemp("two")
    return ranks(REPLICAS, 2, folder), folder


def test_every_process_goes_on_bit_for_bit_with_its_own_random_numbers(of_two: tuple[list[dict], Path]) -> None:
    reports, _ = of_two
    for report in reports:
        assert report["numbers"][1] is False
        assert report["restored"] and report["continued"]
    assert reports[0]["numbers"] != reports[1]["numbers"]


def test_one_process_writes(of_two: tuple[list[dict], Path]) -> None:
    _, folder = of_two
    names = {path.name for path in (folder / "runs/checkpoints/checkpoint_1").iterdir()}
    assert names == {"rank-00000.safetensors", "bases", "shrinkpoint.json", "README.txt"}


def test_what_one_process_cannot_save_is_an_error_on_all(of_two: tuple[list[dict], Path]) -> None:
    reports, _ = of_two
    assert reports[0]["refused"] == reports[1]["refused"]
    kind, text = reports[0]["refused"]
    assert kind == "StateError" and "rank 1" in text and "Stubborn" in text


def test_all_processes_pass_over_what_does_not_load(of_two: tuple[list[dict], Path]) -> None:
    reports, _ = of_two
    assert [report["folder"] for report in reports] == ["checkpoint_1"] * 2
    assert [report["older"] for report in reports] == [["checkpoint_1", ["checkpoint_2"], True]] * 2


def test_replicas_search_together_and_one_writes(of_two: tuple[list[dict], Path]) -> None:
    reports, _ = of_two
    (none, chosen, same), (other_none, other, other_same) = (report["searched"] for report in reports)
    assert (none, other_none) == (False, True) and chosen == other != "None" and same and other_same
    for report in reports:
        assert report["boom"] and report["exact"][:2] == ["inshrinkerator", False] and "boom" in report["exact"][2]


@pytest.fixture(scope="module")
def of_shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], Path]:
    folder = tmp_path_factory.mktemp("shards")
    return ranks(SHARDS, 2, folder), folder


def test_shards_go_on_bit_for_bit_when_older_checkpoints_are_gone(of_shards: tuple[list[dict], Path]) -> None:
    reports, _ = of_shards
    for report in reports:
        assert report["left"] == ["checkpoint_2", "checkpoint_3"]
        assert (report["folder"], report["restored"], report["continued"]) == ("checkpoint_3", True, True)
        assert report["deltas"] == [1, 1]  # keyframes: small deltas with their bases would take more than is kept
        assert report["passed"] == ["checkpoint_4", ["checkpoint_5"], True]
        assert report["lossy"] == ["fisher", True, 6, {"loss": 1.5}, "checkpoint_6"] and 0 < report["near"] < 0.2


def test_shards_lose_their_moments_and_the_newest_resumes(of_shards: tuple[list[dict], Path]) -> None:
    reports, _ = of_shards
    for report in reports:
        assert report["kept"] == [[2, True, 2], [3, True, 2], [4, False, 2]]
        assert report["moments gone"][0] == "NoCheckpointError" and "weights only" in report["moments gone"][1]
        assert report["newest"] == ["checkpoint_4", True]


def test_shards_of_accelerate_itself_are_loaded(of_shards: tuple[list[dict], Path]) -> None:
    reports, _ = of_shards
    assert [report["stock"] for report in reports] == [["checkpoint_5", True]] * 2


def test_an_error_on_one_process_with_shards_is_one_on_all(of_shards: tuple[list[dict], Path]) -> None:
    reports, _ = of_shards
    for name, kind in (("refused", "StateError"), ("others", "MismatchError")):
        assert reports[0][name] == reports[1][name] and reports[0][name][0] == kind


def test_two_optimizers_of_one_sharded_model_are_saved_and_the_model_is_measured(tmp_path: Path) -> None:
    for report in ranks(SPLIT, 2, tmp_path):
        assert report["continued"]
        assert report["schemes"] == ["fisher", "fisher"]  # the loop waits for a measured save
        kind, text = report["shape"]
        assert kind == "MismatchError" and "size mismatch between saved torch.Size([4, 8])" in text


def test_one_process_reads_what_two_have_sharded(
    of_shards: tuple[list[dict], Path], caplog: pytest.LogCaptureFixture
) -> None:
    reports, folder = of_shards
    accelerate_runs.forget()
    alone = Loop(seed=5)
    load_state(alone.accelerator, folder / "runs/checkpoints/checkpoint_3")
    assert "saved by 2 processes and is loaded by 1" in caplog.text
    assert [x.double().sum().item() for x in alone.model.state_dict().values()] == reports[0]["weights"]
    moments = [x["exp_avg"].double().sum().item() for x in alone.optimizer.state.values()]
    assert moments == reports[0]["moments"] and alone.counter.seen["count"] == 28
    accelerate_runs.forget()
