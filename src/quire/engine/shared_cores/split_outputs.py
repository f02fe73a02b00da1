"""One step's columns, cut into those of each front end."""

from __future__ import annotations

from quire.engine.wire.messages import CLIENT_SHIFT, EngineCoreOutputs


def outputs_by_client(outputs: EngineCoreOutputs) -> dict[int, EngineCoreOutputs]:
    """Cut a step's columns by front end; a step of one alone is not copied, and keeps its stats."""
    handles = [*outputs.handles, *(end.handle for end in outputs.finished)]
    handles += [one.handle for one in outputs.started]
    handles += [part.handle for part in outputs.parts]
    clients = {handle >> CLIENT_SHIFT for handle in handles}
    if len(clients) == 1:
        return {clients.pop(): outputs}
    found = {}
    for client in sorted(clients):
        found[client] = _part(outputs, client)
    return found


def _part(outputs: EngineCoreOutputs, client: int) -> EngineCoreOutputs:
    rows: list[int] = []
    places: list[int] = []
    start = 0
    counts = outputs.counts or [1] * len(outputs.handles)
    for row, (handle, count) in enumerate(zip(outputs.handles, counts, strict=True)):
        if handle >> CLIENT_SHIFT == client:
            rows.append(row)
            places += range(start, start + count)
        start += count
    new_places = {place: new for new, place in enumerate(places)}
    return EngineCoreOutputs(
        handles=[outputs.handles[row] for row in rows],
        token_ids=[outputs.token_ids[place] for place in places],
        counts=None if outputs.counts is None else [counts[row] for row in rows],
        finished=[end for end in outputs.finished if end.handle >> CLIENT_SHIFT == client],
        started=[one for one in outputs.started if one.handle >> CLIENT_SHIFT == client],
        parts=[part for part in outputs.parts if part.handle >> CLIENT_SHIFT == client],
        logprobs=None if outputs.logprobs is None else outputs.logprobs.at(new_places),
        timestamp=outputs.timestamp,
        engine_index=outputs.engine_index,
        incarnation=outputs.incarnation,
        weight_version=outputs.weight_version,
    )
