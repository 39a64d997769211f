"""`list` says what there is, in any width, and hides nothing that is broken."""

from __future__ import annotations

import json

import pytest


def test_every_checkpoint_has_a_row_with_what_it_stands_on(run, store):
    done = run("list", store)
    assert done.code == 0
    rows = done.stdout.splitlines()
    assert rows[0].startswith(f"{store}: 4 checkpoints")
    assert [row.split()[0] for row in rows[-4:]] == ["10", "20", "30", "40"]
    assert "keyframe" in rows[-4]
    assert "delta 2 on 20" in rows[-2]
    assert "val_loss" in done.stdout


def test_json_is_all_of_stdout_and_has_every_number(run, store):
    document = json.loads(run("list", store, "--json").stdout)
    assert [one["step"] for one in document["checkpoints"]] == [10, 20, 30, 40]
    third = document["checkpoints"][2]
    assert (third["depth"], third["keyframe"], third["chain"]) == (2, False, [10, 20, 30])
    assert third["ratio"] == pytest.approx(third["raw_bytes"] / third["stored_bytes"])
    assert document["stored_bytes"] == sum(one["stored_bytes"] for one in document["checkpoints"])


def test_a_forgotten_checkpoint_is_hidden_and_said_to_be(run, store):
    run("forget", store, 20)
    done = run("list", store)
    assert "3 checkpoints" in done.stdout
    assert "1 checkpoint forgotten" in done.stderr
    assert "forgotten" in run("list", store, "--all", columns=120).stdout


def test_an_empty_store_is_no_error(run, tmp_path):
    done = run("list", tmp_path)
    assert (done.code, done.stdout.strip()) == (0, f"{tmp_path}: no checkpoint yet")
    assert json.loads(run("list", tmp_path, "--json").stdout)["checkpoints"] == []


@pytest.mark.parametrize("text", ["nowhere", "run/step-000000010/manifest.json"])
def test_what_is_no_directory_is_not_found(run, store, text):
    done = run("list", store.parent / text)
    assert (done.code, done.stdout) == (3, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_broken_manifest_is_named_and_the_others_are_listed(run, store, flip):
    flip(store / "step-000000020" / "manifest.json")
    done = run("list", store)
    assert done.code == 0
    assert "3 checkpoints" in done.stdout
    assert "unreadable" in done.stderr
    assert "step-000000020" in done.stderr
    assert len(json.loads(run("list", store, "--json").stdout)["broken"]) == 1


@pytest.mark.parametrize("columns", [30, 40, 60, 80, 120])
def test_no_line_of_a_table_is_wider_than_the_terminal(run, store, columns):
    rows = run("list", store, columns=columns).stdout.splitlines()[2:]
    assert max(map(len, rows)) <= columns
    assert any("40" in row for row in rows)
    if columns < 60:
        assert "narrow terminal" in " ".join(rows)


def test_a_pipe_gets_every_column_however_long(child, store):
    done = child("list", store, COLUMNS="")
    assert "scheme" in done.stdout
    assert "narrow" not in done.stdout
