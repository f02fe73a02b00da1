"""`POST /classify`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.encodable import to_json
from quire.server.context import RequestName, Server
from quire.server.pooling.inputs import InputReader, prompts_of
from quire.server.pooling.replies import ItemWriter, json_frame, reply_of, sent
from quire.server.pooling.requests import ClassificationRequest
from quire.server.pooling.runs import Pooled, all_pooled, check_size

_OF_ITEM = 16


class LabelItem(msgspec.Struct):
    """The likeliest label of an input, None for one without a name, and the number of each."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


async def classify(server: Server, request: Request) -> Response:
    """Give the labels of each input their numbers."""
    body = await server.read_for_model(request, ClassificationRequest)
    items = body.items()
    labels = _labels(server)
    # before anything is computed: the size of the reply follows from the number of inputs
    check_size(len(items) * len(labels))
    name = RequestName.of(request, "classify-", body.request_id)
    prompts = prompts_of(
        InputReader.of(server, request, body), body, items, body.params("classify")
    )
    results = await all_pooled(server, request, body, name, prompts)

    def item(index: int, result: Pooled) -> bytes:
        numbers = result.numbers
        found = LabelItem(index, labels[int(numbers.argmax())], numbers.tolist(), numbers.size)
        return to_json(found)

    sizes = [result.numbers.size + _OF_ITEM for result in results]
    return await sent(
        server,
        ItemWriter(results, sizes, item),
        json_frame(reply_of(server, body.model, name, results)),
    )


def _labels(server: Server) -> Sequence[str | None]:
    classifier = server.abilities.facts.pooler.classifier
    assert classifier is not None, "the route needs labels"
    return classifier.labels or [None] * classifier.num_labels
