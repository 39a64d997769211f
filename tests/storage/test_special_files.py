"""Pipes, sockets, devices, directories and links to nothing under names of ours: nobody waits, nothing is lost."""

from __future__ import annotations

import json
import textwrap

import pytest
from helpers.processes import run_forked

SETUP = """
    import json, os, shutil, socket, stat, sys
    from pathlib import Path
    import torch
    import shrinkpoint as sp
    from shrinkpoint.errors import ShrinkpointError
    from shrinkpoint.train import Checkpointer
    from shrinkpoint.store import directory as directories
    from shrinkpoint.convert import discover
    from shrinkpoint.train.dcp import latest_valid
    from shrinkpoint.cli.app import app
    from typer.testing import CliRunner

    place = Path(sys.argv[1])
    said = []
    TEMPORARY = ".shrinkpoint-tmp-0123456789abcdef"

    def state(seed):
        return {"w": torch.randn(3000, generator=torch.Generator().manual_seed(seed))}

    def put(path):
        "Something that is no regular file, in the place of whatever is there."
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as end:
                os.chdir(path.parent)
                end.bind(path.name)
        elif kind == "device" and os.geteuid() == 0:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        elif kind == "device":
            path.symlink_to(os.devnull)
        elif kind == "directory":
            path.mkdir()
        elif kind == "link to nothing":
            path.symlink_to("nowhere")
        elif kind == "link to a pipe":
            if not (root / "pipe").exists():
                os.mkfifo(root / "pipe")
            path.symlink_to(root / "pipe")

    def attempt(what, use):
        "Success or an error of ours: nothing else ends this, and it ends."
        print(kind, what, file=sys.stderr, flush=True)
        try:
            use()
            said.append([kind, what, "done"])
        except ShrinkpointError as error:
            said.append([kind, what, type(error).__name__])
"""

STORE = """
    def made(at):
        shutil.rmtree(at, ignore_errors=True)
        with sp.Store(at) as store:
            for step in (1, 2, 3):
                store.save(step, state(step))
            store.forget(1)
        return at

    base = next(path.name for path in made(root / "store").rglob("bases/*"))
    names = [".shrinkpoint-lock", TEMPORARY, f"step-000000002/{TEMPORARY}", f"step-000000003/bases/{TEMPORARY}",
        "step-000000001/forgotten", "step-000000003/rank-00000.safetensors", "step-000000003/manifest.json",
        "step-000000002/manifest.json", "step-000000001/rank-00000.safetensors", f"step-000000003/bases/{base}",
        "step-000000004", "step-000000004/manifest.json", "step-000000004/rank-00000.safetensors",
        "step-000000004/bases", "stranger"]
    for name in names:
        at = made(root / "store")
        put(at / name)
        payloads = sorted(path for path in at.rglob("rank-*") if path.is_file())
        attempt(f"list with {name}", lambda: sp.Store(at).list())
        attempt(f"restore with {name}", lambda: sp.Store(at).restore())
        attempt(f"verify with {name}", lambda: sp.Store(at).verify(deep=True))
        attempt(f"load with {name}", lambda: sp.load(at / name))
        attempt(f"inspect with {name}", lambda: sp.inspect(at / name))
        for what, use in {
            "save": lambda store: store.save(4, state(4)), "save over": lambda store: store.save(3, state(3)),
            "forget": lambda store: store.forget(3), "prune": lambda store: store.prune(dry_run=False),
            "compact": lambda store: store.compact(),
        }.items():
            with sp.Store(at) as store:
                attempt(f"{what} with {name}", lambda: use(store))
            if what == "save" and kind != "directory":  # no storage lists an empty directory
                assert all(path.is_file() for path in payloads), name
"""

FOLDER = """
    def made(at):
        shutil.rmtree(at, ignore_errors=True)
        with Checkpointer() as trail:
            for step in (1, 2):
                trail.save(at / f"step-{step}", state(step))
        return at

    base = next(path.name for path in made(root / "run").rglob("bases/*"))
    names = ["shrinkpoint.json", "rank-00000.safetensors", "bases", f"bases/{base}", TEMPORARY, f"bases/{TEMPORARY}"]
    for name in [*(f"step-2/{one}" for one in names), ".shrinkpoint.base-1", "step-3"]:
        at = made(root / "run")
        put(at / name)
        attempt(f"check with {name}", lambda: directories.verify_directory(at / "step-2", deep=True))
        attempt(f"find with {name}", lambda: directories.find_checkpoints(at))
        with Checkpointer() as trail:
            attempt(f"load with {name}", lambda: trail.load(at / "step-2"))
            attempt(f"save with {name}", lambda: trail.save(at / "step-3", state(3)))
            attempt(f"save into with {name}", lambda: trail.save(at / "step-2", state(4)))
            attempt(f"discard with {name}", lambda: trail.discard(at / "step-2"))
            attempt(f"save after with {name}", lambda: trail.save(at / "step-4", state(4)))
"""

FILE = """
    for name in ("one.safetensors", TEMPORARY):
        put(root / name)
        attempt(f"save beside {name}", lambda: sp.save(state(1), root / "two.safetensors"))
        attempt(f"load {name}", lambda: sp.load(root / name))
        attempt(f"inspect {name}", lambda: sp.inspect(root / name))
        attempt(f"base {name}", lambda: sp.save(state(1), root / "three.safetensors", base=root / name))
    before = os.lstat(root / "one.safetensors")
    attempt("save over", lambda: sp.save(state(1), root / "one.safetensors"))
    if kind != "link to nothing":
        assert said[-1][2] == "StorageError", said[-1]
        assert os.lstat(root / "one.safetensors") == before
"""

FOREIGN = """
    names = ["model.safetensors", "optimizer.pt", "pytorch_model.bin", "model.safetensors.index.json", ".metadata",
        "shrinkpoint.json", "rng_state.pth", "trainer_state.json", "random_states_0.pkl", "checkpoint-7", "step-7.pt",
        "checkpoint-6/optimizer.pt", "checkpoint-6/.metadata", "checkpoint-6/model.safetensors.index.json"]
    for name in names:
        at = root / "foreign"
        shutil.rmtree(at, ignore_errors=True)
        for folder in (at / "checkpoint-5", at / "checkpoint-6"):
            folder.mkdir(parents=True)
            torch.save(state(1), folder / "weights.pt")
        put(at / name)
        attempt(f"find with {name}", lambda: [one.read() for one in discover.discover(at).checkpoints])
        attempt(f"newest with {name}", lambda: latest_valid(at, deep=True))
        attempt(f"find {name}", lambda: [one.read() for one in discover.discover(at / name).checkpoints])
    commands = [["list"], ["show"], ["verify", "--deep"], ["convert", "--dry-run"], ["export", "--out", "e"]]
    for command in commands:
        for place in (at, at / name, at / "checkpoint-6"):
            result = CliRunner().invoke(app, [*command, str(place)])
            assert result.exception is None or isinstance(result.exception, SystemExit), (command, place, result)
"""
KINDS = ["pipe", "socket", "device", "directory", "link to nothing", "link to a pipe"]


FIRST = """
    put(root / "store" / TEMPORARY)
    put(root / "store" / "step-000000001" / TEMPORARY)
    with sp.Store(root / "store") as store:
        attempt("save", lambda: store.save(1, state(1)))
    attempt("manager", lambda: sp.CheckpointManager(root / "store").save(2, extra=state(2)))
    attempt("restore", lambda: sp.Store(root / "store").restore())
    assert os.path.lexists(root / "store" / TEMPORARY)
"""


@pytest.mark.parametrize("code", [STORE, FOLDER, FILE, FOREIGN], ids=["store", "folder", "file", "foreign"])
def test_nothing_waits_for_what_is_no_file_and_every_error_is_ours(tmp_path, code):
    kinds = KINDS if code is FILE else ["pipe", "directory", "link to nothing"]
    assert {kind for kind, _, _ in tried(tmp_path, code, kinds)} == set(kinds)


def test_first_save_goes_by_what_is_named_like_a_temporary(tmp_path):
    assert {(kind, outcome) for kind, _, outcome in tried(tmp_path, FIRST)} == {(kind, "done") for kind in KINDS}


def tried(path, code, kinds=KINDS):
    """What each attempt ended with, in a process that would be killed if it waited for anything."""
    loop = f"for kind in {kinds}:\n    root = place / kind\n    root.mkdir()\n"
    code = textwrap.dedent(SETUP) + loop + textwrap.indent(textwrap.dedent(code), "    ") + "\nprint(json.dumps(said))"
    code = "import warnings\nwarnings.simplefilter('ignore')\n" + code
    return json.loads(run_forked(code, str(path), timeout=200).splitlines()[-1])
