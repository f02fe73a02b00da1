"""Rows of encoders in place of placeholders: an encoder that looks rows up in the model's own table
gives the answers of the prompts that have these ids, however they are computed.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire import SamplingParams
from quire.engine.core.builder import core_over, worker_config
from quire.engine.wire.messages import EngineCoreRequest
from quire.engine.wire.output_parts import FinishReason
from quire.engine.wire.prompt_media import PromptMedia
from quire.executor.uniproc import open_uniproc
from quire.runner.encoder_outputs import EncoderOutputs, GivenEmbeddings
from quire.step.media import MediaItem
from tests.runner.late_engines import late_target, plan_of
from tests.support.simulation import invariants

PLACEHOLDER = 9


class TableEncoder:
    """Looks ids up; fails for the id 199, and for all that is encoded together with it."""

    max_rows = 6

    def __init__(self, model):
        self.model = model
        self.encoded = []

    def encode(self, items):
        if any(199 in item.inputs["ids"] for item in items):
            raise ValueError("a bad picture")
        self.encoded += [item.digest for item in items]
        return [self.model.look_up(torch.from_numpy(item.inputs["ids"])) for item in items]


def open_core(folder, late_seed=None, **wishes):
    target = None if late_seed is None else late_target(late_seed)[0]
    plan = plan_of(folder, async_scheduling=target is not None, **wishes)
    made = []

    def make(model):
        made.append(TableEncoder(model))
        return {"image": made[0], "embeds": GivenEmbeddings(6, model.look_up(torch.tensor([0])))}

    config = replace(worker_config(plan), make_encoders=make)
    return core_over(plan, open_uniproc(config, platform=target)), made[0]


def params(draw):
    fields = draw.choice(({"temperature": 0.0}, {"temperature": 1.0}, {"logprobs": 2}))
    return SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **fields})


def hide(prompt, places):
    """The prompt with placeholders in ranges, and an item for each."""
    shown, items = list(prompt), []
    for start, end in places:
        ids = np.array(prompt[start:end])
        shown[start:end] = [PLACEHOLDER] * (end - start)
        items.append(MediaItem(ids.tobytes(), "image", end - start, [(start, end)], {"ids": ids}))
    return shown, items


def requests(seed, *, are_hidden):
    """Fourteen prompts with few beginnings and pictures, so that they share both."""
    draw = random.Random(seed)
    pictures = [[draw.randrange(10, 199) for _ in range(n)] for n in (3, 5, 6)]
    heads = [[draw.randrange(10, 199) for _ in range(5)] for _ in range(2)]
    for handle in range(14):
        prompt, places = list(draw.choice(heads)), []
        for _ in range(draw.randrange(1, 4)):
            picture = draw.choice(pictures)
            places.append((len(prompt), len(prompt) + len(picture)))
            prompt += picture + [draw.randrange(10, 199) for _ in range(draw.randrange(3))]
        if draw.random() < 0.4:
            prompt += draw.choice(heads)
        shown, items = hide(prompt, places)
        own = params(draw)
        message = EngineCoreRequest(handle, shown if are_hidden else prompt, own, seed=handle)
        message.media = PromptMedia(items) if are_hidden else None
        yield message


def run(core, messages, disturb=None):
    tokens, ends, step = {}, {}, 0
    waiting = list(messages)
    draw = random.Random(1)
    while waiting or core.has_work:
        while waiting and draw.random() < 0.5:
            core.add_request(waiting.pop(0))
        out = core.step()
        step += 1
        invariants.check(core.scheduler)
        if disturb is not None and step % 7 == 0:
            disturb(core)
        counts = out.counts or [1] * len(out.handles)
        new = iter(out.token_ids)
        for handle, count in zip(out.handles, counts, strict=True):
            tokens.setdefault(handle, []).extend(next(new) for _ in range(count))
        ends |= {end.handle: end for end in out.finished}
    invariants.check_idle(core.scheduler)
    return tokens, ends


def preempt(core):
    core.scheduler.reset_prefix_cache(reset_running_requests=True)


WAYS = {
    "eager": {},
    "recorded": {"enforce_eager": False},
    "late": {"late_seed": 5},
    "few blocks": {"num_gpu_blocks_override": 14, "enforce_eager": False},
}


@pytest.mark.parametrize("disturb", [None, preempt], ids=["calm", "preempted"])
@pytest.mark.parametrize("way", WAYS)
def test_rows_stand_where_ids_would(folder, way, disturb):
    plain, encoder = open_core(folder)
    right, _ = run(plain, requests(3, are_hidden=False))
    assert not encoder.encoded
    core, encoder = open_core(folder, **WAYS[way])
    found, ends = run(core, requests(3, are_hidden=True), disturb)
    assert found == right
    assert {end.reason for end in ends.values()} == {FinishReason.LENGTH}
    items = sum(len(m.media.items) for m in requests(3, are_hidden=True))
    assert len(encoder.encoded) < items, "rows are shared"
    assert core.scheduler.counters.prefix_hits > 0
    outputs = core.executor.worker.model_runner.media
    kept = core.scheduler.encoders._outputs
    assert outputs._rows.keys() <= {*kept, *core.scheduler.encoders._dropped}
    core.shutdown()


def test_an_encoder_that_fails_costs_the_requests_of_the_item(folder):
    messages = list(requests(3, are_hidden=True))
    core, _ = open_core(folder)
    right, _ = run(core, messages)
    core, encoder = open_core(folder)
    for handle in (2, 5):
        shown, items = hide(messages[handle].prompt_token_ids[:8] + [199, 11], [(8, 10)])
        messages[handle].prompt_token_ids, messages[handle].media = shown, PromptMedia(items)
    found, ends = run(core, messages)
    bad = {handle for handle, end in ends.items() if end.reason is FinishReason.ERROR}
    assert bad == {2, 5} and "encoder failed for an item" in ends[2].message
    assert {h: t for h, t in found.items() if h not in bad} == {
        h: t for h, t in right.items() if h not in bad
    }
    assert encoder.encoded


def test_embeddings_that_were_given_are_taken_as_they_are(folder):
    core, encoder = open_core(folder)
    prompt = [11, 12, 13, 14, 15, 16, 17]
    own = SamplingParams(max_tokens=6, temperature=0.0)
    right, _ = run(core, [EngineCoreRequest(0, prompt, own)])
    rows = encoder.model.look_up(torch.tensor(prompt[1:6])).numpy()
    item = MediaItem(b"given", "embeds", 5, [(1, 6)], {"embeds": rows})
    message = EngineCoreRequest(1, [11, *[0] * 5, 17], own, media=PromptMedia([item]))
    found, _ = run(core, [message])
    assert found[1] == right[0]


def test_layers_look_up_the_id_of_media_where_rows_stand():
    table, given = torch.arange(20.0).view(10, 2), torch.full((3, 2), -1.0)
    encoder = SimpleNamespace(encode=lambda items: [given for _ in items])
    embeds = torch.zeros(8, 2)
    outputs = EncoderOutputs({"image": encoder}, lambda ids: table[ids], embeds, media_id=4)
    item = MediaItem(b"a", "image", 3, [(2, 4), (5, 6)])
    outputs.add_row(SimpleNamespace(row=1, embedded=list(item.spans())))
    outputs.change(SimpleNamespace(dropped_outputs=[], encodings=[item]))
    batch = SimpleNamespace(ids=torch.tensor([5, 1, 9, 9, 2, 9, 3]), embeds=None, deep=())
    # two tokens of another row, and those of the item's from the second on
    inputs = SimpleNamespace(batch=batch, rows=[0, 1], starts=[0, 1], counts=[1, 6])
    outputs.embed(inputs, np.array([7, 1]))
    assert batch.ids.tolist() == [5, 1, 4, 4, 2, 4, 3]
    assert (batch.embeds == -1).all(1).tolist() == [False, False, True, True, False, True, False]
    assert batch.embeds[1].tolist() == table[1].tolist()


def test_sleep_gives_the_memory_of_rows_back(folder):
    core, encoder = open_core(folder)
    shown, items = hide([11, 12, 13, 14], [(0, 3)])
    own = SamplingParams(max_tokens=4, temperature=0.0)

    def answer(handle):
        message = EngineCoreRequest(handle, shown, own, media=PromptMedia(items))
        return run(core, [message])[0][handle]

    right = answer(0)
    outputs = core.executor.worker.model_runner.media
    assert len(outputs._rows) == 1
    core.sleep(1).result()
    assert not outputs._rows and core.scheduler.encoders.num_free == 12
    assert core.wake_up()
    assert answer(1) == right and len(encoder.encoded) == 2
    core.reset_encoder_cache()
    assert answer(2) == right and len(encoder.encoded) == 3


REFUSED = {
    "modality": (MediaItem(b"a", "audio", 1, [(0, 1)]), None, "Unsupported modality: audio"),
    "no arrays": (MediaItem(b"a", "image", 1, [(0, 1)], {"ids": [1]}), None, "are arrays"),
    "place": (MediaItem(b"a", "image", 9, [(0, 9)]), None, "one after the other in the prompt"),
    "axes": (None, np.zeros((3, 4), np.int32), "positions of a prompt are int32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_model_cannot_take_ends_its_request(folder, name):
    item, positions, text = REFUSED[name]
    core, _ = open_core(folder)
    media = PromptMedia([] if item is None else [item], positions)
    message = EngineCoreRequest(0, [11, 12, 13, 14], SamplingParams(max_tokens=2), media=media)
    _, ends = run(core, [message])
    assert ends[0].reason is FinishReason.ERROR and text in ends[0].message


def test_a_model_without_encoders_refuses_media(folder):
    plan = plan_of(folder)
    core = core_over(plan, open_uniproc(worker_config(plan)))
    item = MediaItem(b"a", "image", 1, [(0, 1)])
    message = EngineCoreRequest(0, [1, 2], SamplingParams(), media=PromptMedia([item]))
    _, ends = run(core, [message])
    assert ends[0].message == "Unsupported modality: image"
