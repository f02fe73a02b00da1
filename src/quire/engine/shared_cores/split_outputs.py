"""One step's columns, cut into those of each front end."""

from __future__ import annotations

from collections.abc import Iterator

from quire.engine.wire.messages import CLIENT_SHIFT, EngineCoreOutputs, LogprobColumns


def split_outputs(
    outputs: EngineCoreOutputs, num_clients: int
) -> Iterator[tuple[int, EngineCoreOutputs]]:
    """(index, columns) of every front end that has something in `outputs`.

    The statistics go to the first of them that gets anything (to front end 0 when nobody does).
    """
    stats = outputs.stats
    parts = [(index, _part(outputs, index)) for index in range(num_clients)]
    found = [(index, part) for index, part in parts if part is not None]
    for index, part in found or [(0, EngineCoreOutputs())]:
        part.timestamp = outputs.timestamp
        part.engine_index, part.incarnation = outputs.engine_index, outputs.incarnation
        part.stats, stats = stats, None
        yield index, part


def outputs_by_client(outputs: EngineCoreOutputs) -> dict[int, EngineCoreOutputs]:
    """The columns of each front end, by its index; where all are one's, the object itself. Only
    `outputs` itself keeps the statistics.
    """
    handles = [*outputs.handles, *(end.handle for end in outputs.finished)]
    handles += [one.handle for one in outputs.started]
    handles += [one.handle for one in outputs.prompt_logprobs]
    handles += [one.handle for one in outputs.pooled]
    clients = {handle >> CLIENT_SHIFT for handle in handles}
    if len(clients) == 1:
        return {clients.pop(): outputs}
    found = {}
    for client in sorted(clients):
        part = _part(outputs, client)
        assert part is not None, "it has a handle here"
        part.timestamp, part.engine_index = outputs.timestamp, outputs.engine_index
        part.incarnation = outputs.incarnation
        found[client] = part
    return found


def _part(outputs: EngineCoreOutputs, client: int) -> EngineCoreOutputs | None:
    rows: list[int] = []
    places: list[int] = []
    start = 0
    counts = outputs.counts or [1] * len(outputs.handles)
    for row, (handle, count) in enumerate(zip(outputs.handles, counts, strict=True)):
        if handle >> CLIENT_SHIFT == client:
            rows.append(row)
            places += range(start, start + count)
        start += count
    part = EngineCoreOutputs(
        handles=[outputs.handles[row] for row in rows],
        token_ids=[outputs.token_ids[place] for place in places],
        counts=None if outputs.counts is None else [counts[row] for row in rows],
        finished=[end for end in outputs.finished if end.handle >> CLIENT_SHIFT == client],
        started=[one for one in outputs.started if one.handle >> CLIENT_SHIFT == client],
        prompt_logprobs=[p for p in outputs.prompt_logprobs if p.handle >> CLIENT_SHIFT == client],
        pooled=[one for one in outputs.pooled if one.handle >> CLIENT_SHIFT == client],
        logprobs=_logprobs(outputs.logprobs, places),
    )
    has_rows = part.handles or part.finished or part.started or part.prompt_logprobs or part.pooled
    return part if has_rows else None


def _logprobs(columns: LogprobColumns | None, places: list[int]) -> LogprobColumns | None:
    if columns is None:
        return None
    where = {place: new for new, place in enumerate(places)}
    taken = [row for row, place in enumerate(columns.index) if place in where]
    if not taken:
        return None
    return LogprobColumns(
        index=[where[columns.index[row]] for row in taken],
        token_ids=columns.token_ids[taken],
        values=columns.values[taken],
        ranks=columns.ranks[taken],
        counts=[columns.counts[row] for row in taken],
    )
