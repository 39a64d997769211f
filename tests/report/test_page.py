"""A page shows what the manifests and files say, and nothing that they say runs."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import accumulate

import pytest
import torch
from helpers.manifests import manifest
from helpers.manifests import run as run_of
from helpers.small_training import Silent
from typer.testing import CliRunner

import shrinkpoint as sp
from shrinkpoint.cli.app import app
from shrinkpoint.report.checkpoints import store_report
from shrinkpoint.report.figures import Chart, series_charts, tensor_boxes, tensor_tree
from shrinkpoint.report.files import TensorRow, describe_recipe, read_file_report
from shrinkpoint.report.page import render_page
from shrinkpoint.report.run import RunReport, worst_rise
from shrinkpoint.store.chain import disk_bytes

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


class Parts(HTMLParser):
    """The tags of a page, its visible text, and what it says of each checkpoint under the mouse."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._within = ""
        self.tips: list[list[str]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._within = dict(attrs).get("id") or tag

    def handle_endtag(self, tag):
        self._within = ""

    def handle_data(self, data):
        if self._within == "tips":
            self.tips = json.loads(data)
        elif self._within not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def charts(self) -> list[str | None]:
        return [attrs["aria-label"] for tag, attrs in self.tags if tag == "svg" and "aria-label" in attrs]


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


def charts_of(*stores, **kwargs) -> dict[str, Chart]:
    runs = [RunReport(where.name, store_report("x", sp.Store(where).list()), None, (), **kwargs) for where in stores]
    return {chart.title: chart for chart in series_charts(runs)}


def points(chart: Chart, style: str) -> list:
    return next(trace.points for trace in chart.traces if trace.style == style)


def test_charts_hold_the_bytes_that_the_store_has(tmp_path):
    where = make_store(tmp_path / "run")
    manifests, charts = sp.Store(where).list(), charts_of(where)
    steps, stored = [10, 20, 30, 40], [manifest.stored_bytes for manifest in manifests]
    assert points(charts["Bytes by step"], "line run0") == [*zip(steps, stored, strict=True)]
    raw = [manifest.raw_bytes for manifest in manifests]
    assert points(charts["Bytes by step"], "line plain run0") == [*zip(steps, raw, strict=True)]
    assert points(charts["Bytes by step"], "square run0") == [(10, stored[0]), (40, stored[3])]
    assert [value for _, value in points(charts["On the disk"], "line run0")] == [*accumulate(stored)]
    assert charts["Bytes by step"].path(charts["Bytes by step"].traces[0]).count("L") == 3


def test_areas_of_boxes_are_the_bytes_of_the_file(tmp_path):
    where = make_store(tmp_path / "run")
    file = read_file_report(sp.Store(where).storage, "step-000000040/rank-00000.safetensors")
    boxes = tensor_boxes(file.tensors)
    assert {"first moments", "second moments", "weights"} <= {box.label.split("/")[0] for box in boxes}
    shares = {
        box.label: math.prod(float(part) for part in re.findall(r"(?:width|height):([\d.]+)%", box.style))
        for box in boxes
    }
    roles = {row.role: row.stored_bytes for row in file.roles}
    for label, role in (("weights", "parameter"), ("first moments", "moment1")):
        share = next(share for name, share in shares.items() if name.startswith(label))
        assert share / 1e4 == pytest.approx(roles[role] / sum(roles.values()), rel=0.02)


def test_a_chain_is_drawn_from_its_keyframe_to_its_end(tmp_path):
    chart = charts_of(make_store(tmp_path / "run"))["Chains"]
    assert points(chart, "line run0") == [(10, 0), (20, 1), None, (20, 1), (30, 2), None]
    assert points(chart, "square run0") == [(10, 0), (40, 0)]
    assert {trace.name for trace in chart.legend} == {"keyframe", "delta"}


def test_deltas_on_newer_files_and_bases_that_are_no_checkpoints_are_told_apart():
    manifests = run_of(3)
    links = tuple(replace(link, step=3, digest=manifest(3).digest) for link in manifests[1].bases)
    back = replace(manifest(2), bases=links)
    report = RunReport("x", store_report("x", [back, manifest(3)]), None, ())
    chart = next(chart for chart in series_charts([report]) if chart.title == "Chains")
    assert points(chart, "line back run0") == [(3, 0), (2, 1), None]
    alone = RunReport("x", store_report("x", manifests[2:]), None, ())
    chart = next(chart for chart in series_charts([alone]) if chart.title == "Chains")
    assert points(chart, "ring run0") == [(manifests[1].step, 1)]
    assert points(chart, "line run0")[:2] == [(manifests[1].step, 1), (manifests[2].step, 2)]


def test_what_the_next_prune_deletes_is_marked_by_the_rules_that_are_given(tmp_path, page):
    where = make_store(tmp_path / "run")
    assert "deletes it" not in page(where).text
    marked = page(where, "--keep-last", 1)
    assert sum("next prune deletes it" in tip for tip in marked.tips[0]) == 3
    assert marked.text.count("deletes it") == 3 + 1  # and the caption
    doomed = charts_of(where, doomed={10: "x", 30: "x"})["Chains"]
    assert points(doomed, "ring doomed") == [(10, 0), (30, 2)]


def test_two_runs_stand_side_by_side_under_short_names(tmp_path, page):
    a, b = make_store(tmp_path / "a"), make_store(tmp_path / "b", sp.Fisher(relative_error=0.3))
    both, charts = page(a, b), charts_of(a, b)
    assert points(charts["Bytes by step"], "line run0") != points(charts["Bytes by step"], "line run1")
    assert [step for step, _ in points(charts["Rise of the loss"], "ring run1")] == [10, 20, 30, 40]
    assert {"Chains: a", "Chains: b"} <= {*both.charts}
    assert "every bit comes back" in both.text and "not measured" in both.text and "multiples of a step" in both.text


def test_the_first_numbers_are_the_ratio_on_the_disk_the_rise_and_the_time(tmp_path, page):
    where = make_store(tmp_path / "run")
    stored = disk_bytes(where.rglob("*.safetensors"))
    raw = sum(manifest.raw_bytes for manifest in sp.Store(where).list())
    parts = page(where)
    assert f"{raw / stored:.2f}x" in parts.text and "4 files of torch.save" in parts.text
    assert "every bit comes back" in parts.text and "torch.save was not timed" in parts.text
    sp.Store(where).forget(10)
    assert f"{raw * 3 / 4 / stored:.2f}x" in page(where).text  # its file is there, and a base


def test_a_rise_that_was_predicted_is_told_beside_those_that_were_not_measured(tmp_path, page):
    predicted = page(make_store(tmp_path / "run", sp.Fisher(relative_error=0.3, terms=1000)))
    assert len(re.findall(r"not measured, predicted [+-][\d.e-]+ nats", predicted.text)) == 4
    assert all("not measured, predicted" in tip for tip in predicted.tips[0])
    nothing_lost = page(make_store(tmp_path / "exact"))
    assert "loss as before" in nothing_lost.tips[0][0] and "Rise of the loss" not in nothing_lost.charts


def test_a_page_is_small(tmp_path):
    where = make_store(tmp_path / "run")
    report(where, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 60_000
    many = RunReport("x", store_report("x", run_of(2000)), None, ())
    assert len(render_page([many])) < 1_000_000


def test_a_file_and_a_checkpoint_of_a_store_have_a_page(tmp_path, page):
    where = make_store(tmp_path / "run")
    file = page(where / "step-000000010" / "rank-00000.safetensors")
    assert not file.charts and "Tensors of the file" in file.text and "Bytes by role and layer" in file.text
    assert "Tensors of step 20" in page(f"{where}@20").text


def test_an_empty_store_has_a_page_without_charts(tmp_path, page):
    (tmp_path / "empty").mkdir()
    assert page(tmp_path / "empty").charts == []


def test_a_broken_manifest_is_listed_and_the_others_are_shown(tmp_path, page):
    where = make_store(tmp_path / "run")
    (where / "step-000000030" / "manifest.json").write_text("{}")
    shown = page(where)
    assert "Unreadable" in shown.text and [tip.split("\n")[0] for tip in shown.tips[0]] == [
        "step 10",
        "step 20",
        "step 40",
    ]


def test_names_from_a_file_are_text_wherever_they_stand(tmp_path, page):
    path = tmp_path / "state.safetensors"
    sp.save({HOSTILE: {"w": torch.randn(64, 64)}}, path)  # in names of tensors, "/" is escaped
    parts = page(path)
    assert {tag for tag, _ in parts.tags} & {"img", "a", "link", "iframe"} == set()
    assert sum(tag == "script" for tag, _ in parts.tags) == 2
    (policy,) = (attrs["content"] for tag, attrs in parts.tags if attrs.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert any(HOSTILE.replace("/", "%2F").split("%")[0] in (attrs.get("data-tip") or "") for _, attrs in parts.tags)
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


def test_missing_directories_of_a_page_are_made(tmp_path):
    out = tmp_path / "new" / "deeper" / "page.html"
    report(make_store(tmp_path / "run"), "--out", out)
    assert out.is_file()


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
    rows = store_report("x", [replace(m, loss=loss) for m, loss in zip(run_of(4), losses, strict=True)]).checkpoints
    assert worst_rise(rows) == ("+3%", "the worst, right after a restore; 1 of 4 not measured")
    assert worst_rise(rows[:1]) == ("none", "every bit comes back") and worst_rise(()) == ("", "")
    assert worst_rise(rows[3:]) == ("not measured", "")


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
