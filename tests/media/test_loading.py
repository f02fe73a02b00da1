"""Names of pictures, what is kept of them, and the whole way of a prompt's pictures."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from quire.errors import InvalidParameter, LoadError, RequestError, UnknownConfigKey
from quire.media.decoding.decoder import DecodeLimits, PictureDecoder, ProcessedPicture
from quire.media.digests import part_digest, picture_digest, uuid_digest
from quire.media.fetch.fetcher import GivenPicture, MediaFetcher
from quire.media.fetch.settings import FetchSettings
from quire.media.image_processors.processor import PictureLayout
from quire.media.image_processors.table import (
    PROCESSORS,
    changeable_settings,
    read_processor,
)
from quire.media.loader import LoadedPicture, LoaderThread, PictureLoader
from quire.media.picture_files import (
    check_picture_files,
    picture_settings,
    read_picture_settings,
)
from quire.media.placed import placed_pictures
from quire.media.processed_cache import ProcessedCache
from quire.media.prompt_rules.facts import PromptFacts
from quire.media.remaking import PictureRemaker
from tests.media.pictures import encoded, picture

WHITE = (255, 255, 255)
LAYOUT = PictureLayout(1, 1, (1, 1), (1, 1))
QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 784,
    "max_pixels": 784 * 16,
}


def test_names_differ_wherever_the_input_of_the_encoder_may():
    row = np.zeros((1, 4, 3), np.uint8)
    names = [
        picture_digest(b"abc", {}),
        picture_digest(b"abd", {}),
        picture_digest(b"abc", {"size": 1}),
        picture_digest(b"abc", {"size": 1.5}),
        picture_digest(b"abc", {}, background=(0, 0, 0)),
        picture_digest(row, {}),
        picture_digest(row.reshape(4, 1, 3), {}),
        picture_digest(row.view(np.int8), {}),
        picture_digest(b"abc", {}, algorithm="sha512"),
        part_digest(picture_digest(b"abc", {}), 0),
        part_digest(picture_digest(b"abc", {}), 1),
        uuid_digest("abc", {}),
        uuid_digest("abc", {}, scope=""),
        uuid_digest("abc", {}, scope="key"),
        uuid_digest("c", {}, scope="keyab"),
        uuid_digest("abc", {"size": 1}, scope="key"),
    ]
    assert len(set(names)) == len(names) and {len(name) for name in names} == {32}
    options = {"b": {"d": 1, "c": [2, 3]}, "a": 1}
    other_order = {"a": 1, "b": {"c": [2, 3], "d": 1}}
    assert picture_digest(b"abc", options) == picture_digest(b"abc", other_order)


def kept(num_bytes):
    return ProcessedPicture(LAYOUT, {"pixel_values": np.zeros(num_bytes, np.uint8)})


def test_the_pictures_used_last_are_kept():
    cache = ProcessedCache(100)
    for name in (b"a", b"b"):
        cache.put(name, kept(40))
    assert cache.get(b"a") is not None
    cache.put(b"c", kept(40))
    assert cache.get(b"b") is None and cache.get(b"a") and cache.get(b"c")
    cache.put(b"d", kept(101))
    assert cache.get(b"d") is None and cache.num_bytes == 80
    assert (cache.num_queries, cache.num_hits) == (5, 3)
    cache.clear()
    assert cache.get(b"a") is None and cache.num_bytes == 0


def folder(tmp_path, **files):
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return tmp_path


def test_settings_are_read_from_both_forms_of_files(tmp_path):
    old = read_picture_settings(folder(tmp_path, preprocessor_config=QWEN), {})
    nested = {"processor_class": "Qwen2_5_VLProcessor", "image_processor": QWEN}
    other = {**QWEN, "max_pixels": 784}
    new = folder(tmp_path, processor_config=nested, preprocessor_config=other)
    assert read_picture_settings(new, {}) == old
    assert old.rule.chat_text == "<|vision_start|><|image_pad|><|vision_end|>"


def test_a_folder_without_a_processor(tmp_path):
    found = read_picture_settings(tmp_path, {})
    assert found is None
    with pytest.raises(LoadError, match="--language-model-only"):
        check_picture_files(found, "a model")


def test_keys_that_may_change_pixels_are_refused_by_name(tmp_path):
    odd = {**QWEN, "do_sharpen": True, "do_flip": None}
    with pytest.raises(UnknownConfigKey, match="Qwen2VLImageProcessor is configured with do_sharp"):
        read_picture_settings(folder(tmp_path, preprocessor_config=odd), {})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"resample": 9}, "resample=9, and the filters"),
        ({"temporal_patch_size": 0}, "temporal_patch_size=0, and it is at least 1"),
        ({"patch_size": 0}, "patch_size=0, and a positive whole number"),
        ({"image_std": [1, 0, 1]}, "it has no zeros"),
        ({"image_mean": [1, 2]}, "a number for each of three channels"),
        ({"do_resize": "yes"}, "do_resize='yes', and it is true or false"),
        ({"max_pixels": 7}, "its shortest_edge is the smaller"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(tmp_path, values, words):
    with pytest.raises(LoadError, match=words):
        read_picture_settings(folder(tmp_path, preprocessor_config={**QWEN, **values}), {})


def test_requests_change_known_settings_alone(tmp_path):
    settings = read_picture_settings(folder(tmp_path, preprocessor_config=QWEN), {})
    assert settings.changed(None) == settings.processor
    assert settings.changed({"max_pixels": 784})["max_pixels"] == 784
    assert settings.changed({"images_kwargs": {"max_pixels": 784}})["max_pixels"] == 784
    sized = settings.changed({"size": {"shortest_edge": 784, "longest_edge": 1568}})
    assert "max_pixels" not in sized and "min_pixels" not in sized
    with pytest.raises(InvalidParameter, match=r"mm_processor_kwargs.colour.*max_pixels"):
        settings.changed({"colour": 1})
    with pytest.raises(InvalidParameter, match="mm_processor_kwargs.patch_size"):
        settings.changed({"patch_size": 16})
    assert settings.changed({"fps": 1, "videos_kwargs": {"fps": 2}}) == settings.processor
    fixed = folder(tmp_path, preprocessor_config=QWEN | {"patch_size": 16})
    settings = read_picture_settings(fixed, {})
    assert settings.changed({"patch_size": 16}) == settings.processor
    with pytest.raises(RequestError, match="mm_processor_kwargs cannot be used: .*max_pixels=0"):
        settings.changed({"max_pixels": 0})


def test_requests_do_not_change_what_an_encoder_is_made_for():
    for name in PROCESSORS:
        keys = changeable_settings(name)
        assert not keys & {"patch_size", "merge_size", "encoder_patch_size", "max_image_size"}
    assert "size" not in changeable_settings("CLIPImageProcessor")
    assert "image_grid_pinpoints" in changeable_settings("LlavaNextImageProcessor")
    assert "size" in changeable_settings("Idefics3ImageProcessor")
    assert "max_soft_tokens" in changeable_settings("Gemma4ImageProcessor")


@pytest.fixture(scope="module")
def decoder():
    made = PictureDecoder()
    yield made
    made.close()


def loader(tmp_path, decoder, **options):
    settings = read_picture_settings(folder(tmp_path, preprocessor_config=QWEN), {})
    cache = ProcessedCache(2**20)
    fetcher = MediaFetcher(FetchSettings())
    return PictureLoader(settings, fetcher, decoder, cache, **options), cache


def test_pictures_are_named_processed_once_and_placed(tmp_path, decoder):
    made, cache = loader(tmp_path, decoder, most_pictures=3)
    first, second = encoded(picture(30, 60)), encoded(picture(60, 60))
    given = [GivenPicture(data=each) for each in (first, second, first)]
    thread = LoaderThread()
    try:
        loaded = thread.run(made.loaded(given))
        with pytest.raises(RequestError, match=r"At most 3 image\(s\)"):
            thread.run(made.loaded([*given, given[0]]))
    finally:
        thread.close()
    assert loaded[0].digest == loaded[2].digest != loaded[1].digest
    assert loaded[0].processed is loaded[2].processed and cache.num_hits == 1
    assert loaded[0].encoded == first
    rule = made.settings.rule
    pictures = [rule.expanded(each.processed.layout) for each in loaded]
    assert [each.runs for each in pictures] == [(2,), (4,), (2,)]
    assert pictures[0].num_rows == loaded[0].processed.arrays["image_grid_thw"].prod() // 4
    ids, places = rule.widened([7, 9, 7, 9, 9], pictures, 9)
    assert ids == [7, 9, 9, 7, 9, 9, 9, 9, 9, 9]
    assert places == [[(1, 3)], [(4, 8)], [(8, 10)]]


def test_a_caller_s_id_stands_for_what_it_sent_itself(tmp_path, decoder):
    made, _ = loader(tmp_path, decoder)
    one, two = encoded(picture(30, 30)), encoded(picture(30, 30, seed=1))

    def load(scope, data=None, uuid="x", **kwargs):
        given = [GivenPicture(data=data, uuid=uuid)]
        return asyncio.run(made.loaded(given, scope=scope, **kwargs))[0]

    assert load("alice", one).digest == load("bob", one).digest, "the bytes decide"
    assert load("bob", two).digest != load("alice", one).digest
    assert load("alice").digest == load("alice", one).digest
    assert load("bob").digest == load("bob", two).digest, "and not what alice calls so"
    with pytest.raises(RequestError, match="Cache miss for image at index 0 but data is not"):
        load("carol")
    with pytest.raises(RequestError, match="Cache miss"):
        load("alice", mm_processor_kwargs={"max_pixels": 784})


def test_a_program_is_trusted_with_its_ids(tmp_path, decoder):
    made, cache = loader(tmp_path, decoder)
    data = encoded(picture(30, 30))
    named = asyncio.run(made.loaded([GivenPicture(data=data, uuid="x")]))[0]
    again = asyncio.run(made.loaded([GivenPicture(data=b"not read", uuid="x")]))[0]
    assert again.digest == named.digest and again.processed is named.processed
    cache.clear()
    with pytest.raises(RequestError, match="Cache miss for image at index 0"):
        asyncio.run(made.loaded([GivenPicture(uuid="x")]))


GEMMA = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 28, "width": 28},
}
GEMMA_TOKENS = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"}


def test_crops_that_attend_in_both_directions_are_items_of_their_own():
    facts = PromptFacts({"image_seq_length": 4}, GEMMA, {}, GEMMA_TOKENS)
    settings = picture_settings("Gemma3Processor", facts)
    changed = settings.changed({"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8})
    processor = read_processor(changed)
    layout = processor.layout(16, 48)
    arrays = processor.arrays(picture(16, 48), layout)
    loaded = LoadedPicture(b"d" * 32, ProcessedPicture(layout, arrays), None, {}, WHITE)
    runs = [(5 * index, 5 * index + 4) for index in range(layout.num_tiles)]
    placed = placed_pictures(settings.rule, [loaded], [runs])
    assert layout.num_tiles == 4 and [each.places for each in placed] == [[run] for run in runs]
    assert {each.num_rows for each in placed} == {4} and placed[0].is_bidirectional
    assert len({each.digest for each in placed}) == 4
    joined = np.concatenate([each.inputs["pixel_values"] for each in placed])
    np.testing.assert_array_equal(joined, arrays["pixel_values"])
    whole = placed_pictures(settings.rule, [loaded], [[(0, 4)]])
    assert whole[0].digest == b"d" * 32 and whole[0].inputs is arrays


def test_a_journal_keeps_what_came_and_makes_the_same_arrays_of_it(tmp_path, decoder):
    made, _ = loader(tmp_path, decoder)
    data = encoded(picture(60, 30))
    given = [GivenPicture(data=data), GivenPicture(pixels=np.asarray(picture(30, 30)))]
    kwargs = {"mm_processor_kwargs": {"max_pixels": 784}, "background": (1, 2, 3)}
    loaded = asyncio.run(made.loaded(given, **kwargs))
    remaker = PictureRemaker(DecodeLimits())
    try:
        for picked in loaded:
            [placed] = placed_pictures(made.settings.rule, [picked], [[(0, 1)]])
            source = remaker.source_of(placed)
            arrays = source.make_inputs().result(60)
            assert source.nbytes in (len(data), 30 * 30 * 3)
            assert arrays.keys() == placed.inputs.keys()
            for name, array in arrays.items():
                np.testing.assert_array_equal(array, placed.inputs[name])
        [named] = placed_pictures(
            made.settings.rule, [replace(loaded[0], encoded=None)], [[(0, 1)]]
        )
        assert remaker.source_of(named) is None
        source = remaker.source_of(replace(placed, part="a crop that cannot be made"))
        assert source is not None
        with pytest.raises(TypeError):  # and not a wait without end
            source.make_inputs().result(60)
    finally:
        remaker.close()
