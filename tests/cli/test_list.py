"""`list` says what there is, in any width, and hides nothing that is broken."""

from __future__ import annotations

import json

import pytest
from helpers.small_training import Silent

from shrinkpoint import Fisher
from shrinkpoint.store import Store


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


@pytest.fixture
def lossy(tmp_path, state_at):
    where = tmp_path / "lossy"
    with Silent(), Store(where) as opened:
        for step in range(100_000, 100_014):
            metrics = {"val_loss": 1.5, "accuracy": 0.25, "learning_rate": 1e-3}
            state = state_at(20 + step % 7)
            opened.save(step, state, scheme=Fisher(relative_error=0.3), metrics=metrics, note="a long story of a run")
    return where


def test_scheme_sizes_and_loss_stay_where_the_terminal_is_narrow(run, lossy):
    def titles(columns):
        return run("list", lossy, columns=columns).stdout.splitlines()[2]

    kept = ("step", "kind", "scheme", "stored", "ratio", "loss rise")
    assert all(title in titles(80) for title in kept) and "note" not in titles(80)
    assert all(title in titles(200) for title in (*kept, "age", "state", "val_loss", "learning_rate", "note"))
    assert all(title in titles(50) for title in ("step", "scheme", "stored", "ratio", "loss rise"))


def test_no_word_is_cut(run, lossy):
    def words(columns):
        shown = run("list", lossy, columns=columns).stdout.split()
        return {word.strip("(:,)") for word in shown} - {"now", "s", "min", *map(str, range(60))}  # the ages

    everything = words(200) | {"narrow", "terminal", "without"}
    assert all(words(columns) <= everything for columns in (40, 50, 60, 72, 80, 100))
