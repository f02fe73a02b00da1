"""Pictures through the engine: transformers' tokens, whatever a step cuts, forgets or finds."""

import os
import signal
from pathlib import Path

import pytest
import torch
from PIL import Image

from quire import LLM, EngineArgs, LLMEngine, SamplingParams
from quire.errors import RequestError
from quire.media.decoding.rgb import as_rgb, opened
from quire.media.faults import MediaFault
from quire.media.picture_files import read_picture_settings
from quire.models.config_reader import read_config, read_whole_config
from quire.models.vision.encoder import VisionEncoder
from quire.models.vision.families import read_vision
from quire.models.vision.pictures import picture_of
from tests.media.pictures import encoded, odd_pictures
from tests.models.vision.spoken import greedy_after, picture, write_spoken
from tests.models.vision.spoken_models import IMAGE, IMAGE_ID, SPOKEN

ACCURACY = 1e-4  # of log-probabilities
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, logit_bias={IMAGE_ID: -100.0}
)


def engine(folder: Path, **options):
    given = {"max_model_len": 128, "dtype": "float32", "max_num_seqs": 4, "block_size": 4}
    return LLM(model=str(folder), **{**given, **options})


def prompts():
    """Texts with pictures: one, two, at both ends, the same text with others."""
    first, second = picture(1), picture(2, 25, 50)
    return [
        (f"w1 {IMAGE} w2 w3", [first]),
        (f"w1 {IMAGE} w2 w3", [second]),
        (f"{IMAGE} w5 w6 {IMAGE}", [first, second]),
        (f"{IMAGE} w5 w6 {IMAGE}", [second, first]),
        ("w7 w8 w9 w1 w2", []),
    ]


def as_prompt(text, pictures, placeholder=IMAGE):
    text = text.replace(IMAGE, placeholder)
    return {"prompt": text, "multi_modal_data": {"image": pictures}} if pictures else text


def inputs_of(name, folder, pictures):
    """Transformers' arguments for pictures, out of the processor that has tests of its own."""
    if not pictures:
        return {}
    settings = read_picture_settings(folder, read_whole_config(folder))
    processor = settings.read()
    text = read_config(folder)
    tower = read_vision(text, text["hidden_size"])[0].tower
    found = [processor.arrays(p, processor.layout(p.height, p.width)) for p in pictures]
    return SPOKEN[name].whole.show([picture_of(arrays, tower) for arrays in found])


def check(model, name, folder, outputs, asked):
    for output, (_, pictures) in zip(outputs, asked, strict=True):
        ids, [completion] = output.prompt_token_ids, output.outputs
        tokens = list(completion.token_ids)
        likeliest, chances = greedy_after(model, ids, inputs_of(name, folder, pictures), tokens)
        assert tokens == likeliest
        found = [each[t].logprob for each, t in zip(completion.logprobs, tokens, strict=True)]
        assert (torch.tensor(found) - chances).abs().max() < ACCURACY


def counted(monkeypatch):
    """A list of the pictures that encoders get from now on."""
    pictures, encode = [], VisionEncoder.encode

    def noting(self, given):
        pictures.extend(given)
        return encode(self, given)

    monkeypatch.setattr(VisionEncoder, "encode", noting)
    return pictures


DEFAULT = ("llava", "qwen2_vl", "idefics3")
"""One run, positions on three axes, several runs with tokens between."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in DEFAULT else [pytest.mark.full]) for n in SPOKEN],
)
def test_answers_are_those_of_transformers(name, tmp_path, monkeypatch):
    model, encoded = write_spoken(name, tmp_path), counted(monkeypatch)
    asked = prompts()
    spoken = SPOKEN[name]
    given = [as_prompt(*each, spoken.placeholder) for each in asked]
    for options in (
        {},
        {"max_num_batched_tokens": spoken.chunk, "enable_prefix_caching": True},
        {"num_gpu_blocks_override": spoken.num_blocks},
    ):
        llm = engine(tmp_path, max_model_len=spoken.length, **options)
        encoded.clear()
        check(model, name, tmp_path, llm.generate(given, PARAMS), asked)
        again = llm.generate(given, PARAMS)
        check(model, name, tmp_path, again, asked)
        assert len(encoded) == 2, "two pictures, twelve times"
        if "num_gpu_blocks_override" not in options:
            assert all((o.num_cached_tokens > 0) == spoken.is_found for o in again[:4])
        del llm


ODD = ("llava", "qwen2_vl", "idefics3", "paddleocr_vl", "kimi_vl", "lighton_ocr", "gemma4")


@pytest.mark.full
@pytest.mark.parametrize("name", ODD)
def test_odd_pictures_have_the_answers_of_transformers(name, tmp_path):
    model, spoken = write_spoken(name, tmp_path), SPOKEN[name]
    llm = engine(tmp_path, max_model_len=spoken.length)
    processor = read_picture_settings(tmp_path, read_whole_config(tmp_path)).read()
    num_refused = 0
    for data in odd_pictures().values():
        image = as_rgb(opened(data, 10**8))
        asked = as_prompt(f"w1 {IMAGE} w2", [data], spoken.placeholder)
        try:
            processor.layout(image.height, image.width)
        except MediaFault:
            num_refused += 1
            with pytest.raises(RequestError, match="Image 0"):
                llm.generate(asked, PARAMS)
            continue
        check(model, name, tmp_path, llm.generate(asked, PARAMS), [("", [image])])
    assert num_refused <= 2  # those that are 3000 times as long as wide


OTHERS = ("qwen3_vl", "gemma3", "paligemma", "internvl")
"""Deep rows, pictures whose tokens see all of them, prompts that do, tiles."""


@pytest.mark.parametrize(
    "name", ["llava", *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]
)
def test_the_bits_alone_are_those_in_a_crowd(name, tmp_path):
    write_spoken(name, tmp_path)
    spoken = SPOKEN[name]
    asked = [as_prompt(*each, spoken.placeholder) for each in prompts()]
    llm = engine(tmp_path, max_model_len=spoken.length, enable_prefix_caching=False)
    for prompt, together in zip(asked, llm.generate(asked, PARAMS), strict=True):
        llm.reset_encoder_cache()
        [alone] = llm.generate(prompt, PARAMS)
        assert alone.outputs[0].token_ids == together.outputs[0].token_ids
        assert alone.outputs[0].logprobs == together.outputs[0].logprobs


def test_equal_texts_with_other_pictures_have_other_answers(tmp_path):
    write_spoken("llava", tmp_path)
    llm = engine(tmp_path)
    found = llm.generate([as_prompt(*each) for each in prompts()], PARAMS)
    assert found[0].prompt_token_ids == found[1].prompt_token_ids
    assert found[0].prompt_token_ids.count(IMAGE_ID) == 16
    assert found[0].outputs[0].logprobs != found[1].outputs[0].logprobs
    assert found[2].outputs[0].logprobs != found[3].outputs[0].logprobs


def test_more_or_fewer_placeholders_than_pictures_are_refused(tmp_path):
    write_spoken("llava", tmp_path)
    llm = engine(tmp_path)
    for text, pictures in ((f"{IMAGE} {IMAGE}", [picture(1)]), ("w1", [picture(1)])):
        with pytest.raises(Exception, match="placeholders"):
            llm.generate(as_prompt(text, pictures), PARAMS)


def test_text_alone_refuses_pictures_and_loads_no_encoder(tmp_path):
    write_spoken("llava", tmp_path)
    llm = engine(tmp_path, language_model_only=True)
    assert llm.generate("w1 w2", PARAMS)[0].outputs[0].token_ids
    with pytest.raises(Exception, match="text alone"):
        llm.generate(as_prompt(IMAGE, [picture(1)]), PARAMS)


def test_chats_with_pictures_are_prompts_with_placeholders(tmp_path):
    write_spoken("llava", tmp_path)
    llm = engine(tmp_path, chat_template="{% for m in messages %}{{ m.content }} w9 {% endfor %}")
    image = {"type": "image_pil", "image_pil": picture(1)}
    parts = [{"type": "text", "text": "w1"}, image]
    [found] = llm.chat([{"role": "user", "content": parts}], PARAMS)
    [same] = llm.generate(as_prompt(f"{IMAGE} w1 w9", [picture(1)]), PARAMS)
    assert found.prompt_token_ids == same.prompt_token_ids
    assert found.outputs[0].token_ids == same.outputs[0].token_ids


def test_options_bound_and_change_pictures(tmp_path):
    write_spoken("llava", tmp_path)
    llm = engine(
        tmp_path,
        limit_mm_per_prompt={"image": 1},
        media_io_kwargs={"image": {"rgba_background_color": [0, 0, 0]}},
        mm_processor_kwargs={"image_mean": [0.1, 0.2, 0.3]},
    )
    with pytest.raises(ValueError, match=r"At most 1 image\(s\) may be provided"):
        llm.generate(as_prompt(f"{IMAGE} {IMAGE}", [picture(1), picture(2)]), PARAMS)
    clear = picture(1).convert("RGBA")
    clear.putalpha(0)
    prompt = as_prompt(IMAGE, [encoded(clear)])
    black = as_prompt(IMAGE, [Image.new("RGB", clear.size)])
    white = {**prompt, "media_io_kwargs": {"image": {}}}
    other = {**black, "mm_processor_kwargs": {"image_mean": [0.5, 0.4, 0.3]}}
    found = llm.generate([prompt, black, white, other], PARAMS)
    [again] = llm.generate(prompt, PARAMS, mm_processor_kwargs={"image_mean": [0.5, 0.4, 0.3]})
    first, same, pale, changed = (output.outputs[0].logprobs for output in found)
    assert first == same and first != pale and first != changed == again.outputs[0].logprobs


def test_no_pictures_in_a_prompt_load_no_encoder(tmp_path):
    write_spoken("llava", tmp_path)
    llm = engine(tmp_path, limit_mm_per_prompt={"image": 0})
    assert llm.generate("w1 w2", PARAMS)[0].outputs[0].token_ids
    with pytest.raises(ValueError, match="text alone"):
        llm.generate(as_prompt(IMAGE, [picture(1)]), PARAMS)


@pytest.mark.full
def test_a_request_goes_on_from_the_file_of_its_picture_after_a_death(tmp_path):
    write_spoken("llava", tmp_path)
    args = EngineArgs(model=str(tmp_path), max_model_len=128, dtype="float32", block_size=4)
    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=True)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
    try:
        found = []
        for kills in (False, True):
            engine.add_request("a", as_prompt(f"w1 {IMAGE}", [encoded(picture(1))]), params)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    [completion] = output.outputs
                    if kills and len(completion.token_ids) >= 3:
                        os.kill(engine.front_end.client.core_status(0).pid, signal.SIGKILL)
                        kills = False
                    if output.finished:
                        found.append((completion.token_ids, completion.logprobs))
        assert found[0] == found[1] and engine.front_end.client.num_restarts == 1
    finally:
        engine.front_end.shutdown()
