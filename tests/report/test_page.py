"""A page shows what the manifests and files say, and nothing that they say runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from helpers.small_training import Silent
from typer.testing import CliRunner

import shrinkpoint as sp
from shrinkpoint.cli.app import app
from shrinkpoint.report.checkpoints import store_report
from shrinkpoint.report.files import TensorRow, describe_recipe
from shrinkpoint.report.page import render_page
from shrinkpoint.report.run import RunReport, worst_rise
from shrinkpoint.report.treemap import tensor_tree

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


class Parts(HTMLParser):
    """The tags of a page, its visible text, and its figures."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._within = ""
        self._is_data = False
        self.data = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._within = tag
        self._is_data = dict(attrs).get("id") == "figures"

    def handle_endtag(self, tag):
        self._within, self._is_data = "", False

    def handle_data(self, data):
        if self._is_data:
            self.data += data
        elif self._within not in ("script", "style"):
            self.words.append(data)

    @property
    def figures(self) -> list[dict]:
        return json.loads(self.data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def make_store(path, scheme="lossless", steps=(10, 20, 30, 40)):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 80), torch.nn.Linear(80, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    with Silent(), sp.CheckpointManager(path, scheme=scheme, keyframe_every=3) as manager:
        for step in steps:
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            manager.save(step, model=model, optimizer=optimizer, rng=False)
    return path


def report(*arguments) -> str:
    done = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def page(tmp_path):
    def build(*arguments) -> Parts:
        report(*arguments, "--out", tmp_path / "page.html", "--force")
        return Parts((tmp_path / "page.html").read_text("utf-8"))

    return build


def trace(figures, name):
    return next(trace for figure in figures for trace in figure["data"] if trace.get("name") == name)


def test_figures_hold_the_bytes_that_the_store_has(tmp_path, page):
    where = make_store(tmp_path / "run")
    manifests = sp.Store(where).list()
    figures = page(where).figures
    assert trace(figures, "stored")["x"] == [10, 20, 30, 40]
    assert trace(figures, "stored")["y"] == [manifest.stored_bytes for manifest in manifests]
    assert trace(figures, "torch.save")["y"] == [manifest.raw_bytes for manifest in manifests]
    (tree,) = (data for figure in figures for data in figure["data"] if data["type"] == "treemap")
    size = where.joinpath("step-000000040", "rank-00000.safetensors").stat().st_size
    sizes = dict(zip(tree["ids"], tree["values"], strict=True))
    assert 0.5 * size < sizes["all"] < size  # all but the header
    roles = set(tree["parents"]) & {"/weights", "/first moments", "/second moments"}
    assert len(roles) == 3 and sum(sizes[role] for role in roles) <= sizes["all"]


def test_what_the_next_prune_deletes_is_marked_by_the_rules_that_are_given(tmp_path, page):
    where = make_store(tmp_path / "run")
    assert "deletes it" not in page(where).text
    marked = page(where, "--keep-last", 1)
    assert trace(marked.figures, "deleted by the next prune")["x"] == [10, 20, 30]
    assert marked.text.count("deletes it") == 3


def test_two_runs_stand_side_by_side_under_short_names(tmp_path, page):
    a, b = make_store(tmp_path / "a"), make_store(tmp_path / "b", sp.Fisher(relative_error=0.3))
    both = page(a, b)
    assert trace(both.figures, "a, stored")["y"] != trace(both.figures, "b, stored")["y"]
    assert trace(both.figures, "b: not measured")["x"] == [10, 20, 30, 40]
    assert "4 not measured" in both.text and "multiples of a step" in both.text and "nothing lost" in both.text


def test_a_rise_that_was_predicted_is_told_beside_those_that_were_not_measured(tmp_path, page):
    predicted = page(make_store(tmp_path / "run", sp.Fisher(relative_error=0.3, terms=1000)))
    assert len(re.findall(r"not measured, predicted [+-][\d.e-]+ nats", predicted.text)) == 4
    hovers = trace(predicted.figures, "not measured")["hovertext"]
    assert all("not measured, predicted" in text for text in hovers)
    nothing_lost = page(make_store(tmp_path / "exact"))
    assert "loss as before" in trace(nothing_lost.figures, "measured, or nothing lost")["hovertext"][0]


def test_a_file_and_a_checkpoint_of_a_store_have_a_page(tmp_path, page):
    where = make_store(tmp_path / "run")
    file = page(where / "step-000000010" / "rank-00000.safetensors")
    assert len(file.figures) == 1 and "Tensors of the file" in file.text
    assert "Tensors of step 20" in page(f"{where}@20").text


def test_an_empty_store_has_a_page_without_figures(tmp_path, page):
    (tmp_path / "empty").mkdir()
    assert page(tmp_path / "empty").figures == []


def test_a_broken_manifest_is_listed_and_the_others_are_shown(tmp_path, page):
    where = make_store(tmp_path / "run")
    (where / "step-000000030" / "manifest.json").write_text("{}")
    shown = page(where)
    assert "Unreadable" in shown.text and trace(shown.figures, "stored")["x"] == [10, 20, 40]


def test_names_from_a_file_are_text_wherever_they_stand(tmp_path, page):
    path = tmp_path / "state.safetensors"
    sp.save({HOSTILE: {"w": torch.randn(64, 64)}}, path)  # in names of tensors, "/" is escaped
    parts = page(path)
    assert {tag for tag, _ in parts.tags} & {"img", "a", "link", "iframe"} == set()
    assert sum(tag == "script" for tag, _ in parts.tags) == 3
    (policy,) = (attrs["content"] for tag, attrs in parts.tags if attrs.get("http-equiv"))
    assert "default-src 'none'" in policy
    labels = parts.figures[0]["data"][0]["labels"]
    assert labels and not any("<" in label for label in labels)
    assert HOSTILE.replace("/", "%2F") in parts.text


def test_nothing_of_the_page_comes_from_elsewhere(tmp_path, page):
    parts = page(make_store(tmp_path / "run"))
    assert not [attrs for _, attrs in parts.tags if attrs.get("src") or attrs.get("href")]


def test_other_files_are_not_replaced_and_pages_are(tmp_path):
    where, out = make_store(tmp_path / "run"), tmp_path / "thesis.html"
    out.write_text("four years of work")
    done = CliRunner().invoke(app, ["report", str(where), "--out", str(out)])
    assert done.exit_code == 2 and out.read_text() == "four years of work"
    assert "--force" in done.output
    report(where, "--out", out, "--force")
    report(where, "--out", out)


def test_three_places_are_refused(tmp_path):
    done = CliRunner().invoke(app, ["report", "a", "b", "c"])
    assert done.exit_code == 2 and "one or two" in done.output


def row(name: str, raw: int, role: str = "parameter") -> TensorRow:
    return TensorRow(name, "F32", (raw // 4,), role, raw, raw // 2, "coded", "r", False, False, "exact")


def test_boxes_of_very_many_tensors_add_up_and_stay_few():
    rows = [row(f"layers.{index // 100}.{index}.w", 400 + 4 * index) for index in range(5000)]
    nodes = {node.id: node for node in tensor_tree([*rows, row("m", 40, "moment1"), row("none", 0)])}
    assert len(nodes) < 3200
    assert nodes[""].raw_bytes == sum(row.raw_bytes for row in rows) + 40
    assert (
        nodes["/weights"].raw_bytes == nodes["/weights/layers"].raw_bytes + nodes["/weights/smaller tensors"].raw_bytes
    )
    assert nodes["/first moments/smaller tensors"].raw_bytes == 40


def test_a_recipe_is_told_in_words_whatever_it_is():
    for recipe, words in [
        ({"kind": "plain"}, "exact, as it is"),
        ({"kind": "coded", "runs": [{"tokens": "delta", "predictor": "adam"}]}, "exact, from the base by Adam's step"),
        ({"kind": "coded", "runs": [{"tokens": "level"}]}, "exact, coded alone"),
        ({"kind": "gridded", "law": "log"}, "powers"),
        ({"kind": "quantized", "bins": 7}, "values on 7 levels"),
        *(
            ({"kind": kind, "runs": runs, "law": 3, "bins": "x"}, None)
            for kind in ("coded", 5, None)
            for runs in (None, [3])
        ),
        ("junk", "unknown"),
        (None, "unknown"),
    ]:
        assert describe_recipe(recipe) == words or (words is None and describe_recipe(recipe))


def test_the_worst_rise_is_the_largest_that_was_measured():
    losses = [
        None,
        {"chosen": {}, "degradation": 0.01},
        {"chosen": {}, "degradation": 0.03},
        {"chosen": {}, "measured": False},
    ]
    from helpers.manifests import run as manifests

    rows = store_report("x", [replace(m, loss=loss) for m, loss in zip(manifests(4), losses, strict=True)]).checkpoints
    assert worst_rise(rows) == "+3 %; 1 not measured"
    assert worst_rise(rows[:1]) == "nothing lost" and worst_rise(()) == ""


def test_reprs_for_notebooks_are_html_without_names_that_run(tmp_path):
    path = tmp_path / "state.safetensors"
    saved = sp.save({HOSTILE: torch.randn(64, 64)}, path)
    where = make_store(tmp_path / "run")
    for shown in (saved._repr_html_(), sp.Store(where)._repr_html_()):
        tags = {tag for tag, _ in Parts(shown).tags}
        assert {"table", "dl"} <= tags and "script" not in tags
    assert "and 10 earlier checkpoints" in sp.Store(make_store(tmp_path / "long", steps=range(30)))._repr_html_()


def test_plain_reprs_are_one_short_line(tmp_path):
    where = make_store(tmp_path / "run", sp.Fisher(relative_error=0.3))
    store = sp.Store(where)
    model = torch.nn.Sequential(torch.nn.Linear(64, 80), torch.nn.Linear(80, 64))
    restored = sp.CheckpointManager(where).restore(model=model)
    with Silent(), sp.CheckpointManager(tmp_path / "other", scheme=sp.Fisher(relative_error=0.3)) as manager:
        saved = manager.save(1, model=model)
    for value in (
        saved,
        store,
        store.manifest(),
        store.restore(),
        restored,
        restored.report,
        store.prune(sp.Keep(last=1)),
    ):
        assert "\n" not in repr(value) and len(repr(value)) < 320 + len(str(where)), repr(value)
    assert re.fullmatch(r"<SaveReport fisher, keyframe, .* of .*x\), loss not measured, .* s>", repr(saved))


def test_without_plotly_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("shrinkpoint.report.page.find_spec", lambda name: None)
    with pytest.raises(sp.errors.PolicyError, match=r"shrinkpoint\[cli\]"):
        render_page([RunReport("x", None, None, ())])
