"""`show` tells what one checkpoint, or one file, is made of."""

from __future__ import annotations

import json


def test_the_newest_checkpoint_is_shown_unless_a_step_is_named(run, store):
    assert f"{store}, step 40" in run("show", store).stdout
    done = run("show", store, "--step", 30)
    assert done.stdout.startswith(f"{store}, step 30\n")
    assert "10 > 20 > 30" in done.stdout
    documents = [run("show", *where, "--json").stdout for where in ([f"{store}@30"], [store, "--step", 30])]
    assert documents[0] == documents[1]  # a table says how long ago the save was


def test_the_bytes_of_all_roles_and_of_the_header_are_the_bytes_of_the_file(run, store, payload):
    document = json.loads(run("show", store, "--tensors", "--json").stdout)
    (file,) = document["files"]
    assert file["bytes"] == payload(40).stat().st_size
    assert sum(role["stored_bytes"] for role in file["roles"]) + file["header_bytes"] == file["bytes"]
    assert sum(one["stored_bytes"] for one in file["tensors"]) + file["header_bytes"] == file["bytes"]
    assert {role["role"] for role in file["roles"]} >= {"parameter", "moment1", "moment2"}


def test_every_tensor_has_a_row(run, store):
    out = run("show", store, "--tensors", columns=200).stdout
    for name in ("model/weight", "model/bias", "optimizer/state/0/exp_avg", "frozen", "extra/order"):
        assert name in out
    assert "32x64" in out


def test_what_did_not_change_is_told_to_be_as_in_the_base(run, store):
    rows = {
        one["name"]: one
        for one in json.loads(run("show", f"{store}@20", "--tensors", "--json").stdout)["files"][0]["tensors"]
    }
    assert rows["frozen"]["stored_bytes"] < rows["frozen"]["raw_bytes"] / 100
    assert rows["frozen"]["needs_base"]


def test_plain_values_are_shown_by_path(run, store):
    document = json.loads(run("show", store, "--json").stdout)
    values = document["files"][0]["values"]
    assert values["extra/epoch"] == "2"
    assert values["extra/best"] == "inf"
    assert values["extra/scale"].startswith("0.5 ")
    assert values["optimizer/param_groups/0/betas"] == "(0.9, 0.999)"
    assert "extra/epoch" in run("show", store).stdout


def test_the_rise_of_the_loss_is_shown_beside_its_budget_and_what_restores_have_left(run, tmp_path):
    import torch

    import shrinkpoint as sp

    torch.manual_seed(0)
    model, inputs = torch.nn.Linear(64, 64), torch.randn(512, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def evaluate(model):
        return (model(inputs) - inputs.roll(1, 1)).square().mean(1)

    for step in (1, 2):
        with sp.CheckpointManager(tmp_path / "run", scheme=sp.Fisher(budget="2%", evaluate=evaluate)) as manager:
            manager.restore(model=model, optimizer=optimizer)
            for _ in range(5):
                optimizer.zero_grad()
                evaluate(model).mean().backward()
                optimizer.step()
            manager.save(step, model=model, optimizer=optimizer)
    rows = dict(line.split("  ", 1) for line in run("show", tmp_path / "run").stdout.splitlines() if "  " in line)
    assert rows["loss"].strip().endswith("%), budget 2%")
    assert "step in standard deviations 0." in rows["lost"]
    assert rows["lossy restores"].strip().startswith("1, remaining rise of the loss about ")


def test_a_file_alone_is_shown_without_its_store(run, payload):
    done = run("show", payload(20))
    assert done.code == 0
    assert "delta on bases/" in done.stdout.replace("\n", "")
    assert json.loads(run("show", payload(10), "--json").stdout)["parent"] is None


def test_a_step_that_is_not_there_is_not_found_and_the_message_says_which_are(run, store):
    done = run("show", store, "--step", 7)
    assert done.code == 3
    assert "10, 20, 30, 40" in done.stderr


def test_a_step_of_a_file_and_two_steps_are_usage_errors(run, store, payload):
    assert run("show", payload(10), "--step", 10).code == 2
    assert run("show", f"{store}@10", "--step", 20).code == 2


def test_names_that_would_move_the_cursor_are_shown_harmless(run, tmp_path, state_at):
    from shrinkpoint.store import Store

    with Store(tmp_path / "run") as store:
        store.save(1, {"extra": {"\x1b[2J\nevil": 1}}, note="\x1b]0;title\x07", metrics={"\x1b[1m": 1.0})
    for arguments in (["show", tmp_path / "run", "--tensors"], ["list", tmp_path / "run"]):
        out = run(*arguments, columns=200).stdout
        assert "\x1b" not in out
        assert "\x07" not in out
        assert "\\x1b" in out
