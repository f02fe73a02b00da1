"""The engine's load in a header of a response, for load balancers: a report of ORCA (Open Request
Cost Aggregation), the standard of Envoy and of gRPC, in the names that vLLM's servers report.
"""

from __future__ import annotations

import json

from starlette.requests import Request

from quire.errors import EngineError
from quire.observability.metrics import Gauge
from quire.server.context import Server

FORMAT = "endpoint-load-metrics-format"
REPORT = "endpoint-load-metrics"
REPORTED = ("kv_cache_usage_perc", "num_requests_waiting")


async def load_headers(server: Server, request: Request) -> dict[str, str]:
    """The report in the request's FORMAT, TEXT or JSON; {} without a format or statistics."""
    asked = request.headers.get(FORMAT, "").upper()
    if asked not in ("TEXT", "JSON"):
        return {}
    try:
        await server.engine.refresh_metrics()
        metrics = server.engine.get_metrics()
    # a report that is missing does not make the answer fail
    except EngineError:
        return {}
    found = dict.fromkeys(REPORTED, 0.0)
    for metric in metrics:
        name = metric.name.rpartition(":")[2]
        if isinstance(metric, Gauge) and name in found:
            # several cores have a value each, and the fullest one is what a balancer has to know
            found[name] = max(found[name], float(metric.value))
    if asked == "JSON":
        return {REPORT: f"JSON {json.dumps({'named_metrics': found})}"}
    return {REPORT: "TEXT " + ", ".join(f"named_metrics.{n}={v}" for n, v in found.items())}
