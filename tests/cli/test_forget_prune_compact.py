"""`forget`, `prune` and `compact` change a store, and never what a checkpoint decodes to."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers.stores import stored_bytes

from shrinkpoint.store import Store


def steps(run, store, *options):
    return [one["step"] for one in json.loads(run("list", store, "--json", *options).stdout)["checkpoints"]]


def test_forget_hides_and_deletes_nothing(run, store, payload):
    done = run("forget", store, 10, 20)
    assert (done.code, steps(run, store)) == (0, [30, 40])
    assert steps(run, store, "--all") == [10, 20, 30, 40]
    assert payload(10).exists()
    assert Store(store).load(30)["extra"]["epoch"] == 1


def test_forgetting_twice_is_fine_and_says_so(run, store):
    run("forget", store, 10)
    done = run("forget", store, 10, "--json")
    assert (done.code, json.loads(done.stdout)) == (0, {"forgotten": [], "left": 3})


def test_one_step_that_is_not_there_and_none_is_forgotten(run, store):
    assert run("forget", store, 10, 11).code == 3
    assert steps(run, store) == [10, 20, 30, 40]


def test_a_checkpoint_with_a_broken_manifest_can_be_forgotten_and_pruned(run, store, flip):
    flip(store / "step-000000040" / "manifest.json")
    assert run("verify", store).code == 1
    assert run("forget", store, 40).code == 0
    assert run("prune", store, "--apply").code == 0
    assert run("verify", store).code == 0
    assert not (store / "step-000000040").exists()


def test_prune_only_tells_until_it_is_applied(run, store):
    done = run("prune", store, "--keep-last", 1)
    assert done.code == 0
    assert "would delete 3 checkpoints" in done.stdout
    assert steps(run, store) == [10, 20, 30, 40]
    done = run("prune", store, "--keep-last", 1, "--apply")
    assert "deleted 3 checkpoints" in done.stdout
    assert steps(run, store) == [40]
    assert run("verify", store).code == 0


def test_each_rule_has_an_option_and_every_checkpoint_a_reason(run, store):
    for rules, kept in (
        (["--keep-every", 20], [10, 20, 40]),
        (["--keep-best", 1], [10, 20, 40]),  # 20 has the smallest loss, and stands on 10
        (["--keep-best", 1, "--mode", "max"], [40]),
        (["--keep-within", "1h"], [10, 20, 30, 40]),
    ):
        plan = json.loads(run("prune", store, *rules, "--json").stdout)
        assert (plan["applied"], plan["keep"]) == (False, kept)
        assert set(plan["reasons"]) == {"10", "20", "30", "40"} and all(plan["reasons"].values())


def test_older_checkpoints_become_weights_only_and_every_command_says_so(run, store, tmp_path, state_at):
    rules = ("--keep-last", 3, "--moments-last", 1)
    promised = json.loads(run("prune", store, *rules, "--json").stdout)
    assert (promised["applied"], promised["weights_only"], promised["rewrite"]) == (False, [20, 30], [20, 30])
    assert "would delete 1 checkpoint" in run("prune", store, *rules).stdout
    assert steps(run, store) == [10, 20, 30, 40]
    before = stored_bytes(Store(store).storage)
    done = run("prune", store, *rules, "--apply")
    assert "weights only" in done.stdout
    assert before - stored_bytes(Store(store).storage) == promised["bytes"] > 0
    rows = json.loads(run("list", store, "--json").stdout)["checkpoints"]
    assert {row["step"]: row["weights_only"] for row in rows} == {20: True, 30: True, 40: False}
    assert "delta 1 on 20, weights only" in run("list", store, columns=200).stdout
    assert "retention has deleted" in run("show", f"{store}@30").stdout
    done = run("verify", store, "--deep")
    assert (done.code, "2 checkpoints with weights only" in done.stderr) == (0, True)
    done = run("export", f"{store}@30", tmp_path / "a.pt")
    assert (done.code, "step 30 has weights only" in done.stderr) == (0, True)
    assert torch.equal(torch.load(tmp_path / "a.pt")["model"]["weight"], state_at(30)["model"]["weight"])
    run("report", store, "--out", tmp_path / "page.html")
    assert "keyframe, weights only" in (tmp_path / "page.html").read_text()
    done = run("prune", store, *rules, "--apply")
    assert "nothing to delete" in done.stdout


def test_prune_says_what_stays_for_deltas_and_compacts_it(run, store, state_at):
    done = run("prune", store, "--keep-last", 2)
    assert "2 checkpoints" in done.stderr and "kept only as bases of deltas: 10, 20 (see --compact)" in done.stderr
    done = run("prune", store, "--keep-last", 2, "--compact", "--apply")
    assert (done.code, "wrote 1 again" in done.stdout, done.stderr) == (0, True, "")
    assert steps(run, store) == [30, 40]
    assert run("verify", store, "--deep").code == 0
    assert torch.equal(Store(store).load(30)["model"]["weight"], state_at(30)["model"]["weight"])


@pytest.mark.parametrize("span", ["7", "soon", "-1d"])
def test_a_span_that_means_nothing_is_a_usage_error(run, store, span):
    assert run("prune", store, f"--keep-within={span}").code == 2
    assert run("prune", store, "--keep-last", 0).code == 2


def test_compact_frees_deltas_from_what_is_forgotten(run, store, state_at):
    run("forget", store, 20)
    assert json.loads(run("compact", store, "--dry-run", "--json").stdout)["rewritten"][0]["step"] == 30
    done = run("compact", store)
    assert done.code == 0
    assert "wrote 1 checkpoint" in done.stdout
    run("prune", store, "--apply")
    assert steps(run, store, "--all") == [10, 30, 40]
    assert run("verify", store, "--deep").code == 0
    assert torch.equal(Store(store).load(30)["model"]["weight"], state_at(30)["model"]["weight"])


def test_compact_makes_one_step_a_keyframe(run, store, tmp_path):
    shutil.copytree(store, tmp_path / "before")
    changed = json.loads(run("compact", store, "--step", 30, "--json").stdout)["rewritten"]
    assert [(one["step"], one["before"]["depth"], one["after"]["depth"]) for one in changed] == [(30, 2, 0)]
    assert run("diff", f"{tmp_path / 'before'}@30", f"{store}@30").code == 0


def test_compact_with_nothing_to_do_is_fine(run, store):
    for arguments in ([], ["--step", 10]):
        done = run("compact", store, *arguments)
        assert (done.code, "nothing to do" in done.stdout) == (0, True)
    assert run("compact", store, "--step", 11).code == 3


def test_a_store_that_is_being_saved_to_can_be_read_and_not_changed(run, child, store, state_at):
    with Store(store) as saver:
        saver.save(50, state_at(50))
        assert run("list", store).code == 0
        assert run("show", store).code == 0
        assert run("verify", store).code == 0
        assert run("prune", store, "--keep-last", 1).code == 0
        for refused in (
            child("forget", store, 10),  # by another process
            run("prune", store, "--keep-last", 1, "--apply"),
            run("compact", store, "--step", 30),
        ):
            assert (refused.code, refused.stdout) == (5, "")
            assert refused.stderr.startswith("error: ")
    assert run("forget", store, 10).code == 0
