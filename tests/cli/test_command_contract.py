"""What every command promises: exit codes, one line for an error, no torch to look, no noise in a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from helpers.timeouts import PATIENCE

from shrinkpoint import errors
from shrinkpoint.cli.console import ExitCode, exit_code_of

COMMANDS = ("list", "show", "verify", "diff", "export", "forget", "prune", "compact")


def test_every_error_of_the_tree_has_its_exit_code():
    expected = {
        "FormatError": 4,
        "CorruptError": 4,
        "TruncatedError": 4,
        "VersionError": 4,
        "ChainError": 4,
        "NotFoundError": 3,
        "StateError": 7,
        "MismatchError": 7,
        "PolicyError": 2,
        "StorageError": 6,
        "NoSpaceError": 6,
        "LockedError": 5,
        "MissingExtraError": 7,
        "MembershipError": 7,
        "ShrinkpointError": 7,
    }
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    kinds = [kind for kind in classes if issubclass(kind, errors.ShrinkpointError)]
    assert {kind.__name__: int(exit_code_of(kind("here", found="this", do="that"))) for kind in kinds} == expected


def test_help_names_every_command_and_every_command_has_help(run):
    done = run("--help")
    assert all(f" {name} " in done.stdout for name in COMMANDS)
    for name in COMMANDS:
        assert run(name, "--help").code == 0


def test_the_version_is_the_package_s(run):
    from importlib.metadata import version

    assert run("--version").stdout == f"shrinkpoint {version('shrinkpoint')}\n"


@pytest.mark.parametrize(
    "arguments", [["frobnicate"], ["list"], ["list", ".", "--no-such"], ["prune", ".", "--mode", "best"]]
)
def test_a_wrong_command_line_is_a_usage_error(run, arguments):
    done = run(*arguments)
    assert (done.code, done.stdout) == (2, "")
    assert "Usage" in done.stderr


def test_an_error_is_one_line_and_the_traceback_is_there_for_the_asking(child, tmp_path):
    quiet = child("list", tmp_path / "nowhere")
    assert (quiet.code, quiet.stdout, quiet.stderr.count("\n")) == (3, "", 1)
    for loud in (
        child("list", tmp_path / "nowhere", "--traceback"),
        child("--traceback", "list", tmp_path / "nowhere"),
        child("list", tmp_path / "nowhere", SHRINKPOINT_TRACEBACK="1"),
    ):
        assert loud.code == 3
        assert "Traceback" in loud.stderr
        assert "NotFoundError" in loud.stderr


def test_a_newline_in_a_name_does_not_make_a_second_line(run, tmp_path):
    done = run("list", tmp_path / "a\nerror: b\x1b[2J")
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize("command", ["list", "show", "show --tensors", "verify", "forget 10", "prune --apply"])
def test_looking_and_tidying_never_import_torch(child, store, command):
    name, *rest = command.split()
    options = [one for one in rest if one.startswith("--")]
    arguments = [name, str(store), *(one for one in rest if not one.startswith("--")), *options, "--json"]
    code = (
        "import sys\nfrom shrinkpoint.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'safetensors'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = child(*arguments, python=("-c", code))
    assert done.code == 0, done.stderr
    json.loads(done.stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["show", "--tensors"],
        ["verify"],
        ["prune"],
        ["compact", "--dry-run"],
        ["forget", "10"],
    ],
)
def test_json_is_plain_whatever_the_terminal(run, store, arguments):
    name, *rest = arguments
    done = run(name, store, *rest, "--json", columns=20, env={"FORCE_COLOR": "1"})
    assert done.code == 0
    json.loads(done.stdout)
    assert "\x1b" not in done.stdout


def test_colour_only_where_it_is_wanted(run, store):
    terminal = {"TERM": "xterm-256color"}
    forced, unwanted = {**terminal, "FORCE_COLOR": "1"}, {**terminal, "FORCE_COLOR": "1", "NO_COLOR": "1"}
    assert "\x1b[" in run("show", store, env=forced).stdout
    assert "\x1b[" not in run("show", store, env=terminal).stdout
    assert "\x1b[3" in run("verify", store, env=forced).stdout
    assert "\x1b[3" not in run("verify", store, env=unwanted).stdout
    assert "\x1b[3" not in run("list", "nowhere", env=unwanted).stderr


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_who_leaves_ends_the_command_quietly(store, options):
    done = subprocess.Popen(
        [sys.executable, "-m", "shrinkpoint", "list", str(store), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "SHRINKPOINT_TRACEBACK": ""},
    )
    done.stdout.close()  # as `head` does, before a byte is written
    stderr = done.stderr.read()
    done.stderr.close()
    assert done.wait(timeout=PATIENCE) == ExitCode.BROKEN_PIPE
    assert stderr == b""


def test_a_terminal_that_knows_only_ascii_is_served(child, store):
    for arguments in (["list", store], ["show", store, "--tensors"], ["prune", store, "--keep-last", "1"]):
        assert child(*arguments, PYTHONIOENCODING="ascii", PYTHONUTF8="0").code == 0
    where = store.rename(store.with_name("Läufe"))
    assert "L\\xe4ufe: 4 checkpoints" in child("list", where, PYTHONIOENCODING="ascii", PYTHONUTF8="0").stdout


def test_the_console_script_and_the_module_are_the_same(child):
    assert (
        child("--version").stdout
        == child("--version", python=("-c", "from shrinkpoint.cli import main; main()")).stdout
    )


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_says_what_to_install(child, missing):
    code = f"import sys\nsys.modules[{missing!r}] = None\nfrom shrinkpoint.cli import main\nmain()"
    done = child(python=("-c", code))
    assert done.code == 2
    assert 'pip install "shrinkpoint[cli]"' in done.stderr
    assert "Traceback" not in done.stderr
