"""The Grafana dashboard against what a real server exports, with PromQL's own parser."""

import json
import re
from pathlib import Path

import promql_parser
import pytest
from grafana_dashboard import PREFIXES, dashboard, render
from prometheus_client.parser import text_string_to_metric_families

from tests.server.serve_process import serving

PAGE = Path(__file__).parents[2] / "docs" / "grafana_dashboard.json"
BOARD = dashboard()
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="module")
def exported(server):
    """prefix -> {name of a sample: [labels of each]}."""
    server.post("/v1/completions", {"prompt": "def", "max_tokens": 3})
    with serving("--metrics-prefix", "quire:") as other:
        other.post("/v1/completions", {"prompt": "def", "max_tokens": 3})
        texts = {"vllm:": server.get("/metrics").text, "quire:": other.get("/metrics").text}
    samples = {prefix: {} for prefix in PREFIXES}
    for prefix, text in texts.items():
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[prefix].setdefault(sample.name, []).append(sample.labels)
    return samples


def expressions(prefix):
    for panel in PANELS:
        for target in panel["targets"]:
            text = target["expr"].replace("${prefix}", prefix)
            text = text.replace("$__rate_interval", "1m")
            yield target, text.replace("$model", ".*").replace("$engine", "0")


def selectors(node):
    """Every vector selector of an expression, and the labels that are grouped by on the way."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "vs", "param"):
        child = getattr(node, name, None)
        if child is not None and not isinstance(child, str | float):
            yield from selectors(child)
    for child in getattr(node, "args", None) or ():
        yield from selectors(child)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_metric_is_exported_with_the_labels_that_are_asked_for(exported, prefix):
    seen = set()
    for target, text in expressions(prefix):
        tree = promql_parser.parse(text)
        found = list(selectors(tree))
        assert len(found) == text.count(prefix), text
        grouped = re.findall(r"by \((\w+)\)", text) + re.findall(
            r"{{(\w+)}}", target["legendFormat"]
        )
        for selector in found:
            assert selector.name in exported[prefix], selector.name
            labels = exported[prefix][selector.name][0]
            assert {m.name for m in selector.matchers.matchers} | set(grouped) <= labels.keys(), (
                text
            )
            seen.add(selector.name)
    assert len(seen) > 25


def test_names_that_are_asked_for_in_variables_are_exported(exported):
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.fullmatch(
                r"label_values\(\$\{prefix\}(\w+), (\w+)\)", variable["query"]
            ).groups()
            for prefix in PREFIXES:
                assert label in exported[prefix][prefix + name][0]


def test_rates_are_of_counters_and_buckets_only():
    for _, text in expressions("vllm:"):
        for name in re.findall(r"(?:rate|increase)\(vllm:(\w+)", text):
            assert re.search(r"_(total|bucket|sum|count)$", name), text
        for name in re.findall(r"(?<!rate\()(?<!increase\()vllm:(\w+)", text):
            assert not re.search(r"_(total|bucket|sum|count)$", name), text


def test_panels_have_their_places():
    places = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"])
                 for y in range(at["y"], at["y"] + at["h"])}  # fmt: skip
        assert not cells & places, panel["title"]
        places |= cells
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_panels_say_what_they_show():
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles) and all(panel["description"] for panel in PANELS)
    for panel in PANELS:
        assert panel["type"] in ("timeseries", "heatmap")
        assert panel["fieldConfig"]["defaults"]["unit"] in ("short", "s", "percentunit", "reqps")
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs)
        for target in panel["targets"]:
            assert target["format"] == ("heatmap" if panel["type"] == "heatmap" else "time_series")
            assert target["datasource"] == panel["datasource"]
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS))) - {"__rate_interval"}
    assert used == {variable["name"] for variable in BOARD["templating"]["list"]}


def test_the_file_in_the_documents_is_up_to_date():
    assert PAGE.read_text() == render(), (
        "run PYTHONPATH=src python tools/grafana_dashboard.py > docs/grafana_dashboard.json"
    )
