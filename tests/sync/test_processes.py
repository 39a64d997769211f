"""Subscribers in other processes see whole versions only, whatever becomes of the publisher."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
import torch
from helpers.processes import run_forked
from helpers.s3_server import S3Server

from shrinkpoint.errors import LockedError
from shrinkpoint.sync import Publisher, Subscriber

PROGRAM = """
import itertools, json, os, random, signal, sys, time
import torch
from shrinkpoint.errors import LockedError
from shrinkpoint.sync import Publisher, Subscriber

where, kills = sys.argv[1], int(sys.argv[2])

def state(version):
    generator = torch.Generator().manual_seed(version)
    moved = (torch.rand(200, 200, generator=generator) < .02).bfloat16()
    return {"even": torch.full((5,), 2 * version), "matrix": moved + version, "version": torch.tensor(version)}

def write():
    while True:
        try:
            publisher = Publisher(where, keyframe_every=5, keep=3, threads=1)
            break
        except LockedError:  # of the one that was killed
            time.sleep(.05)
    for version in itertools.count(0 if publisher.version is None else publisher.version + 1):
        publisher.publish(state(version), version=version)

def begin():
    child = os.fork()
    if child == 0:
        try:
            write()
        finally:
            os._exit(1)
    return child

random.seed(0)
live = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
subscriber = Subscriber(where, threads=1, poll=.001)
seen = []

def look(seconds):
    end = time.monotonic() + seconds
    while True:
        update = subscriber.update(live, wait=.01)
        if update is not None:
            seen.append(update.version)
            expected = state(update.version)
            assert all(torch.equal(live[name], expected[name]) for name in expected), update
        if time.monotonic() > end:
            return

for number in range(kills):
    child, before = begin(), len(seen)
    while len(seen) < before + 3:  # until it is at work
        look(.05)
    look(random.random() * .2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    look(.1)
    assert subscriber.latest() == subscriber.version == seen[-1]
fresh = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
Subscriber(where, threads=1).update(fresh)
assert all(torch.equal(fresh[name], live[name]) for name in live)
assert seen == sorted(set(seen))
print(json.dumps(seen))
"""


def test_a_publisher_killed_at_any_moment_leaves_whole_versions(tmp_path: Path):
    seen = json.loads(run_forked(PROGRAM, str(tmp_path), "4"))
    assert len(seen) >= 12


@pytest.mark.usefixtures("s3")
def test_a_bucket_serves_the_same_through_a_real_protocol(s3: S3Server):
    url = f"s3://checkpoints/{uuid.uuid4().hex}"
    generator = torch.Generator().manual_seed(0)
    state = {"w": torch.randn(300, 300, generator=generator).bfloat16(), "n": torch.tensor(0)}
    live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    subscriber = Subscriber(url, poll=0.01)
    assert subscriber.update(live) is None
    with Publisher(url, keep=2, keyframe_every=3) as publisher:
        with pytest.raises(LockedError):
            Publisher(url)
        for version in range(8):
            state["w"][version] *= 1.01
            state["n"] += 1
            publisher.publish(state)
            if version != 4:
                update = subscriber.update(live)
                assert update is not None and update.version == version
                assert all(torch.equal(live[name], state[name]) for name in state)
    with Publisher(url) as publisher:
        assert publisher.version == 7
        s3.clear()
        assert publisher.publish(state).keyframe_bytes is None
        puts = [path for method, path, _ in s3.requests() if method == "PUT"]
        assert sum("version-" in path for path in puts) == 1 and sum("published.json" in path for path in puts) == 1
        s3.clear()
        assert subscriber.latest() == 8
        assert [method for method, _, _ in s3.requests()] in (["GET"], ["HEAD", "GET"])
