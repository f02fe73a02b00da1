"""An IO processor: vectors of records, whose fields become the text."""

from collections.abc import Sequence
from typing import Any

from quire.io_processor import IOProcessor


class Records(IOProcessor):
    """{"records": [{"name": ...}, ...]} -> {"vectors": [[...], ...]}."""

    def parse_data(self, data: Any) -> list[dict[str, Any]]:
        if not isinstance(data, dict) or not isinstance(data.get("records"), list):
            raise ValueError("it must be {'records': [...]}")
        return data["records"]

    def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> list[str]:
        return [", ".join(f"{key}: {value}" for key, value in each.items()) for each in prompt]

    def post_process(
        self, model_output: Sequence[Any], request_id: str | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        return {"vectors": [output.outputs.data.tolist() for output in model_output]}


def io_processor() -> str:
    """The name of the class."""
    return "acme_quire.records:Records"
