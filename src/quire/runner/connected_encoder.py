"""An encoder whose outputs are kept outside of the engine, too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

from torch import Tensor

from quire.distributed.ec_connector import ECConnectorBase
from quire.runner.encoder_outputs import Encoder
from quire.step.media import MediaItem

logger = logging.getLogger(__name__)


class ConnectedEncoder:
    """Loads the rows that a connector keeps, has an encoder make the others, and saves those.

    A digest says nothing of the weights, so names of items begin with what `name_of_weights` gives;
    with None nothing is loaded or saved. A connector that fails costs time, and no request.
    """

    def __init__(
        self,
        encoder: Encoder,
        connector: ECConnectorBase,
        name_of_weights: Callable[[], str | None],
        like: Tensor,
    ) -> None:
        """like: a row of the encoder's, of its type and on its device."""
        self._encoder, self._connector = encoder, connector
        self._name_of_weights, self._like = name_of_weights, like

    @property
    def max_rows(self) -> int:
        return self._encoder.max_rows

    def encode(self, items: Sequence[MediaItem]) -> Sequence[Tensor]:
        weights = self._name_of_weights()
        if weights is None:
            return self._encoder.encode(items)
        names = {item.digest: f"{weights}-{item.digest.hex()}" for item in items}
        known = self._loaded(items, names) if self._connector.is_consumer else {}
        missing = [item for item in items if item.digest not in known]
        if missing:
            made = self._encoder.encode(missing)
            for item, rows in zip(missing, made, strict=True):
                known[item.digest] = rows
                if self._connector.is_producer:
                    self._save(names[item.digest], rows)
        return [known[item.digest] for item in items]

    def _loaded(
        self, items: Sequence[MediaItem], names: Mapping[bytes, str]
    ) -> dict[bytes, Tensor]:
        """Rows of items that are kept, by digest."""
        connector, cache = self._connector, dict[str, Tensor]()
        try:
            for item in items:
                if connector.has_cache_item(name := names[item.digest]):
                    feature = SimpleNamespace(identifier=name, modality=item.modality)
                    connector.update_state_after_alloc(SimpleNamespace(mm_features=[feature]), 0)
            connector.bind_connector_metadata(connector.build_connector_meta(None))
            connector.start_load_caches(cache)
        except Exception:
            logger.exception("outputs of encoders were not loaded")
        finally:
            connector.clear_connector_metadata()
        found = {}
        for item in items:
            rows = cache.get(names[item.digest])
            if rows is not None and self._fits(item, rows):
                found[item.digest] = rows.to(self._like.device)
        return found

    def _fits(self, item: MediaItem, rows: Tensor) -> bool:
        wanted = (item.num_rows, self._like.shape[-1])
        return tuple(rows.shape) == wanted and rows.dtype == self._like.dtype

    def _save(self, name: str, rows: Tensor) -> None:
        try:
            self._connector.save_caches({name: rows}, name)
        except Exception:
            logger.exception("the output of an encoder was not saved")
