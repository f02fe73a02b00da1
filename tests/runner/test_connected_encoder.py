"""Outputs of encoders that are kept in a folder: made once, for all who have the same weights."""

import os
from types import SimpleNamespace

import pytest
import torch

from quire.config.ec_transfer_config import ec_transfer_config
from quire.distributed.ec_connector import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECExampleConnector,
)
from quire.errors import InvalidParameter, NotBuiltYet
from quire.executor.encoder_transfer import make_connector
from quire.runner.connected_encoder import ConnectedEncoder
from quire.step.media import MediaItem

WIDTH = 8


class Counting:
    """Makes rows out of a digest, and counts."""

    max_rows = 16

    def __init__(self):
        self.ran = []

    def encode(self, items):
        self.ran += [item.digest for item in items]
        return [
            torch.arange(item.num_rows * WIDTH, dtype=torch.bfloat16).reshape(-1, WIDTH)
            + item.digest[0]
            for item in items
        ]


def item(number, num_rows=3):
    return MediaItem(bytes([number]) * 32, "image", num_rows, [(0, num_rows)])


def settings(folder, role="ec_both", **more):
    extra = {"shared_storage_path": str(folder)}
    given = {"ec_connector": "ECExampleConnector", "ec_role": role, **more}
    return {**given, "ec_connector_extra_config": extra}


def opened(folder, role="ec_both", weights="a"):
    encoder = Counting()
    connector = make_connector(ec_transfer_config(settings(folder, role)))
    like = torch.empty(WIDTH, dtype=torch.bfloat16)
    return encoder, ConnectedEncoder(encoder, connector, lambda: weights, like)


def equal(found, right):
    return all(torch.equal(*pair) for pair in zip(found, right, strict=True))


def test_rows_are_made_once_for_all_with_the_same_weights(tmp_path):
    first, saving = opened(tmp_path, "ec_producer")
    items = [item(1), item(2, 5)]
    right = Counting().encode(items)
    assert equal(saving.encode(items), right) and equal(saving.encode(items[:1]), right[:1])
    assert len(first.ran) == 3, "a producer loads nothing"
    second, loading = opened(tmp_path, "ec_consumer")
    assert equal(loading.encode([item(3), *items]), [*Counting().encode([item(3)]), *right])
    assert second.ran == [item(3).digest]
    third, again = opened(tmp_path)
    again.encode([*items, item(3)])
    assert third.ran == [item(3).digest], "a consumer saves nothing"
    other, elsewhere = opened(tmp_path, weights="b")
    elsewhere.encode(items)
    assert len(other.ran) == 2
    unnamed, alone = opened(tmp_path, weights=None)
    alone.encode(items)
    assert len(unnamed.ran) == 2 and len(list(tmp_path.iterdir())) == 5


def spoil_by_length(file):
    os.truncate(file, file.stat().st_size - 10)


def spoil_by_zeros(file):
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.seek(size - 20)
        stream.write(bytes(20))


@pytest.mark.parametrize(
    "spoil", [spoil_by_length, spoil_by_zeros, lambda file: file.write_bytes(b"")]
)
def test_a_torn_file_is_a_miss_and_is_mended(tmp_path, spoil):
    _, saving = opened(tmp_path)
    right = saving.encode([item(1)])
    [folder] = tmp_path.iterdir()
    [file] = folder.iterdir()
    spoil(file)
    encoder, loading = opened(tmp_path)
    assert equal(loading.encode([item(1)]), right) and len(encoder.ran) == 1
    assert equal(loading.encode([item(1)]), right) and len(encoder.ran) == 1
    assert [each.name for each in folder.iterdir()] == ["encoder_cache.safetensors"]


def test_rows_of_another_size_or_type_are_a_miss(tmp_path):
    _, saving = opened(tmp_path)
    saving.encode([item(1)])
    encoder, loading = opened(tmp_path)
    loading.encode([item(1, num_rows=4)])
    assert len(encoder.ran) == 1


def test_a_folder_that_cannot_be_written_costs_no_request(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    encoder, saving = opened(file)
    assert equal(saving.encode([item(1)]), Counting().encode([item(1)])) and encoder.ran


class InMemory(ECConnectorBase):
    """A connector of one's own, as a program writes it."""

    kept = {}

    def start_load_caches(self, encoder_cache, **kwargs):
        for name in self._get_connector_metadata().names:
            encoder_cache[name] = self.kept[name]

    def save_caches(self, encoder_cache, mm_hash, **kwargs):
        self.kept[mm_hash] = encoder_cache[mm_hash]

    def has_cache_item(self, identifier):
        return identifier in self.kept

    def update_state_after_alloc(self, request, index):
        self.wanted = [*getattr(self, "wanted", []), request.mm_features[index].identifier]

    def build_connector_meta(self, scheduler_output):
        meta = ECConnectorMetadata()
        meta.names, self.wanted = getattr(self, "wanted", []), []
        return meta


def test_a_class_of_ones_own():
    given = {"ec_connector": "InMemory", "ec_connector_module_path": __name__}
    connector = make_connector(ec_transfer_config(given))
    assert connector.role is ECConnectorRole.WORKER and connector.is_producer
    encoder = Counting()
    like = torch.empty(WIDTH, dtype=torch.bfloat16)
    both = ConnectedEncoder(encoder, connector, lambda: "a", like)
    assert equal(both.encode([item(1)]), both.encode([item(1)])) and len(encoder.ran) == 1


REFUSED = {
    "ECMooncakeConnector": ({"ec_connector": "ECMooncakeConnector"}, "the store of Mooncake"),
    "ECCPUConnector": ({"ec_connector": "ECCPUConnector"}, "RDMA"),
    "unknown": ({"ec_connector": "Mine"}, "It is not known"),
    "none": ({"ec_role": "ec_both"}, "it names an ec_connector"),
    "role": (settings("/x", "ec_nothing"), "ec_producer, ec_consumer or ec_both"),
    "port": (settings("/x", ec_port=5), "keeps files in a folder"),
    "field": (settings("/x", ec_other=5), "ec_other"),
    "folder": ({"ec_connector": "ECExampleConnector"}, "shared_storage_path is a folder"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    given, says = REFUSED[name]
    with pytest.raises((InvalidParameter, NotBuiltYet)) as caught:
        ec_transfer_config(given)
    assert says in str(caught.value)


def test_other_classes_are_refused():
    for name, path in (("Counting", __name__), ("Nothing", __name__), ("X", "no.module")):
        given = {"ec_connector": name, "ec_connector_module_path": path}
        with pytest.raises(InvalidParameter, match="ec_connector"):
            make_connector(ec_transfer_config(given))


def test_the_base_class_is_asked_for_its_methods():
    config = SimpleNamespace(ec_transfer_config=ec_transfer_config(settings("/tmp/x")))
    assert ECExampleConnector(config, ECConnectorRole.SCHEDULER).role is ECConnectorRole.SCHEDULER
    with pytest.raises(TypeError, match="abstract"):
        ECConnectorBase(config, ECConnectorRole.WORKER)
