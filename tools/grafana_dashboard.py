"""A Grafana dashboard of an engine's metrics, made from a table of panels.

`python tools/grafana_dashboard.py > docs/grafana_dashboard.json` writes its JSON, which Grafana
imports. Which prefix the
names have, which models and which cores are shown is chosen on the dashboard.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

PREFIXES = ("vllm:", "quire:")
QUANTILES = (0.5, 0.9, 0.99)

_COLUMNS = 24
_HEIGHT = 8
_SCHEMA = 39
"""Of Grafana 10; later ones bring it up to date when they import it."""
_WHERE = '{model_name=~"$model",engine=~"$engine"}'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Curve:
    """One expression and what its lines are called. `name(...)` in it is the metric `name` of the
    chosen prefix, models and cores.
    """

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """Curves over time (`timeseries`), or counts by size over time (`heatmap`). `unit` is
    Grafana's name of it.
    """

    title: str
    about: str
    unit: str
    curves: Sequence[Curve]
    kind: str = "timeseries"


def metric(name: str) -> str:
    """The selector of a metric as the dashboard is set."""
    return "${prefix}" + name + _WHERE


def _rate(name: str, by: str = "") -> str:
    return f"sum{by}(rate({metric(name)}[$__rate_interval]))"


def _share(part: str, whole: str) -> str:
    return f"{_rate(part)} / {_rate(whole)}"


def _quantiles(title: str, about: str, name: str) -> Panel:
    """The quantiles of a histogram of seconds, and its mean."""
    buckets = _rate(f"{name}_bucket", " by (le) ")
    curves = [Curve(f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in QUANTILES]
    curves.append(Curve(_share(f"{name}_sum", f"{name}_count"), "mean"))
    return Panel(title, about, "s", curves)


def _sizes(title: str, about: str, name: str) -> Panel:
    """How many values of a histogram fell into each bucket."""
    curve = Curve(f"sum by (le) (increase({metric(f'{name}_bucket')}[$__rate_interval]))", "{{le}}")
    return Panel(title, about, "short", [curve], "heatmap")


def _gauge(name: str, legend: str, by: str = "") -> Curve:
    return Curve(f"sum{by}({metric(name)})", legend)


_REFUSED = (
    "sum by (reason) "
    '(rate(${prefix}admission_rejections_total{model_name=~"$model"}[$__rate_interval]))'
)
"""Of the front end, which is no core's."""

ROWS: dict[str, Sequence[Panel]] = {
    "Load": (
        Panel(
            "Completions",
            "In the batch, and waiting for a place in it.",
            "short",
            [_gauge("num_requests_running", "running"), _gauge("num_requests_waiting", "waiting")],
        ),
        Panel(
            "KV cache",
            "Share of the blocks that requests hold; near 100 % requests wait or are preempted.",
            "percentunit",
            [Curve(f"max by (engine) ({metric('kv_cache_usage_perc')})", "core {{engine}}")],
        ),
        Panel(
            "Prefix cache hits",
            "Share of the prompt tokens looked for that were found.",
            "percentunit",
            [Curve(_share("prefix_cache_hits_total", "prefix_cache_queries_total"), "found")],
        ),
        Panel(
            "Why completions wait",
            "No room, or put off for a reason of their own.",
            "short",
            [_gauge("num_requests_waiting_by_reason", "{{reason}}", " by (reason) ")],
        ),
        Panel(
            "Refused and started over",
            "Requests refused because too much waits, and preemptions for lack of blocks.",
            "reqps",
            [
                Curve(_REFUSED, "refused: {{reason}}"),
                Curve(_rate("num_preemptions_total"), "preempted"),
            ],
        ),
        Panel(
            "Sleep",
            "1 at the state that the engine is in.",
            "short",
            [
                Curve(
                    f"max by (sleep_state) ({metric('engine_sleep_state')})",
                    "{{sleep_state}}",
                )
            ],
        ),
    ),
    "Throughput": (
        Panel(
            "Tokens per second",
            "Prompt tokens count when their request's first token comes.",
            "short",
            [
                Curve(_rate("generation_tokens_total"), "generated"),
                Curve(_rate("prompt_tokens_total"), "prompt"),
                Curve(_rate("prompt_tokens_cached_total"), "prompt, from a cache"),
            ],
        ),
        Panel(
            "Completions ended",
            "By what ended them.",
            "reqps",
            [
                Curve(
                    _rate("request_success_total", " by (finished_reason) "), "{{finished_reason}}"
                )
            ],
        ),
        _sizes("Tokens per step", "Computed and generated in one step.", "iteration_tokens_total"),
    ),
    "Latency": (
        _quantiles("Time to first token", "From arrival.", "time_to_first_token_seconds"),
        _quantiles("Between tokens", "Two outputs of a completion.", "inter_token_latency_seconds"),
        _quantiles("Whole request", "From arrival to the end.", "e2e_request_latency_seconds"),
        _quantiles("Waiting", "From arrival to being scheduled.", "request_queue_time_seconds"),
        _quantiles("Prefill", "To the first token.", "request_prefill_time_seconds"),
        _quantiles("Decode", "First token to last.", "request_decode_time_seconds"),
    ),
    "Requests": (
        _sizes("Prompt tokens", "Of a completion.", "request_prompt_tokens"),
        _sizes("Generated tokens", "Of a completion.", "request_generation_tokens"),
        _sizes("max_tokens", "As requests ask for.", "request_params_max_tokens"),
    ),
}
"""Row -> its panels, three beside each other."""


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    return {
        "uid": "quire-engine",
        "title": "Quire",
        "description": "Metrics of Quire, or of any engine with vLLM's names.",
        "tags": ["quire", "vllm", "llm"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource",
           "query": "prometheus"}  # fmt: skip
    choices = [{"text": p, "value": p, "selected": p == PREFIXES[0]} for p in PREFIXES]
    yield {"name": "prefix", "label": "Prefix", "type": "custom", "query": ",".join(PREFIXES),
           "options": choices, "current": choices[0]}  # fmt: skip
    for name, label in (("model", "model_name"), ("engine", "engine")):
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": _SOURCE,
            "query": f"label_values(${{prefix}}num_requests_running, {label})",
            "refresh": 2,  # with the time range, so that new servers appear
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "sort": 1,
            "current": {"text": "All", "value": "$__all"},
        }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    width = _COLUMNS // 3
    for title, panels in ROWS.items():
        number += 1
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "panels": [],
               "gridPos": {"h": 1, "w": _COLUMNS, "x": 0, "y": top}}  # fmt: skip
        top += 1
        for place, panel in enumerate(panels):
            number += 1
            line, column = divmod(place, 3)
            at = {"h": _HEIGHT, "w": width, "x": column * width, "y": top + line * _HEIGHT}
            yield {"id": number, "gridPos": at, **_panel(panel)}
        top += -(-len(panels) // 3) * _HEIGHT


def _panel(panel: Panel) -> dict[str, Any]:
    is_heatmap = panel.kind == "heatmap"
    form = "heatmap" if is_heatmap else "time_series"
    targets = [
        {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": curve.expression,
         "legendFormat": curve.legend, "format": form}
        for place, curve in enumerate(panel.curves)
    ]  # fmt: skip
    defaults: dict[str, Any] = {"unit": panel.unit}
    if not is_heatmap:
        defaults |= {"min": 0, "custom": {"fillOpacity": 10, "showPoints": "never"}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _heatmap_options() if is_heatmap else _line_options(),
    }


def _line_options() -> dict[str, Any]:
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _heatmap_options() -> dict[str, Any]:
    return {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 32},
        "legend": {"show": False},
        "tooltip": {"mode": "single"},
        "yAxis": {"axisPlacement": "left"},
    }


def render() -> str:
    """The JSON that Grafana imports."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
