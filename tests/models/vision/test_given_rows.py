"""Pictures given as the rows that an encoder makes of them have the pictures' answers."""

import base64
import io

import pytest
import torch

from quire.errors import InvalidParameter, RequestError
from quire.media.given_rows import GRID
from tests.models.vision.spoken import picture, write_spoken
from tests.models.vision.spoken_models import IMAGE
from tests.models.vision.test_pictures import PARAMS, engine


def answers(llm, prompts):
    found = llm.generate(prompts, PARAMS, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].cumulative_logprob) for each in found]


def media_of(llm):
    return llm.llm_engine.front_end.client.engine_core.executor.worker.model_runner.media


def rows_of(llm, prompt):
    """The answer to a picture, and the rows that the encoder has made of it."""
    kept = set(media_of(llm)._rows)
    [answer] = answers(llm, [prompt])
    [new] = media_of(llm)._rows.keys() - kept
    return answer, media_of(llm)._rows[new].clone()


def asked(data):
    return {"prompt": f"w1 {IMAGE} w2 w3", "multi_modal_data": {"image": data}}


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_rows_have_the_answers_of_their_pictures(tmp_path, name):
    write_spoken(name, tmp_path)
    with engine(tmp_path, enable_mm_embeds=True, enforce_eager=True) as llm:
        first, rows = rows_of(llm, asked(picture(1)))
        second, more = rows_of(llm, asked(picture(2)))
        ran = []
        encoder = media_of(llm)._encoders["image"]
        encode = encoder.encode
        encoder.encode = lambda items: ran.append(items) or encode(items)
        llm.reset_prefix_cache()
        if name == "llava":
            forms = [rows, rows[None], [rows], {"image_embeds": rows}]
            both = torch.stack([rows, more])
        else:
            assert len(rows) == len(more)
            grid = torch.tensor([[1, *sides_of(llm, picture(1))]])
            forms = [
                {"image_embeds": rows, GRID: grid},
                {"image_embeds": [rows], GRID: grid.tolist()},
            ]
            both = {"image_embeds": torch.cat([rows, more]), GRID: grid.repeat(2, 1)}
        assert answers(llm, [asked(form) for form in forms]) == [first] * len(forms)
        text = f"{IMAGE} w5 {IMAGE}"
        pair = {"prompt": text, "multi_modal_data": {"image": both}}
        right = {"prompt": text, "multi_modal_data": {"image": [picture(1), picture(2)]}}
        [by_rows] = answers(llm, [pair])
        assert not ran, "no encoder has run"
        assert answers(llm, [right]) == [by_rows] and first != second
        if name == "qwen2_vl":
            wrong = [
                ({"image_embeds": rows}, "come with image_grid_thw"),
                ({"image_embeds": rows, GRID: [[1, 2, 2]]}, "of this grid 1"),
                ({"image_embeds": rows, GRID: [[1, 3, 2]]}, "multiples of 2"),
                ({"image_embeds": rows, GRID: [[0.5]]}, "it has whole numbers"),
                ({"image_embeds": [rows], GRID: grid.repeat(2, 1)}, "2 grids for 1 pictures"),
            ]
        else:
            wrong = [
                ({"image_embeds": rows, GRID: [[1, 2, 2]]}, "pictures of this model have no grid"),
                ({"image_embeds": rows[:, :-1]}, "its shape must be [tokens, "),
                ({"image_embeds": rows * float("nan")}, "not finite"),
                ({"image_embeds": rows, "audio": 1}, "image_embeds has image_embeds and"),
                ({"image_embeds": "%"}, "this is not base64"),
            ]
        for data, says in wrong:
            with pytest.raises(RequestError) as caught:
                answers(llm, [asked(data)])
            assert says in str(caught.value)


def sides_of(llm, given):
    """Rows and columns of a picture's patches."""
    settings = llm.llm_engine.front_end.inputs.pictures._loader.settings
    processor = settings.read()
    layout = processor.layout(given.height, given.width)
    return processor.arrays(given, layout)[GRID].reshape(3)[1:].tolist()


def test_chats_have_rows_in_base64(tmp_path):
    write_spoken("llava", tmp_path)
    template = (
        "{% for m in messages %}{% for p in m.content %}"
        "{{ '<image>' if p.type == 'image' else p.text }} {% endfor %}{% endfor %}"
    )
    with engine(tmp_path, enable_mm_embeds=True, enforce_eager=True) as llm:
        _, rows = rows_of(llm, asked(picture(1)))
        stream = io.BytesIO()
        torch.save(rows, stream)
        text = {"type": "text", "text": "w2"}

        def chat(part):
            messages = [{"role": "user", "content": [part, text]}]
            [found] = llm.chat(messages, PARAMS, use_tqdm=False, chat_template=template)
            return found.outputs[0].token_ids

        right = chat({"type": "image_pil", "image_pil": picture(1)})
        encoded = base64.b64encode(stream.getvalue()).decode()
        for value in (rows, encoded, {"image_embeds": encoded}):
            assert chat({"type": "image_embeds", "image_embeds": value}) == right


def test_without_the_option_rows_are_refused(tmp_path):
    write_spoken("llava", tmp_path)
    says = "You must set `--enable-mm-embeds` to input `image_embeds`"
    with engine(tmp_path, enforce_eager=True) as llm, pytest.raises(RequestError, match=says):
        answers(llm, [asked({"image_embeds": torch.zeros(4, 8)})])
    with pytest.raises(InvalidParameter, match="enable_mm_embeds"):
        engine(tmp_path, enable_mm_embeds=True, language_model_only=True)


def test_outputs_are_kept_for_another_engine(tmp_path):
    folder, kept = tmp_path / "model", tmp_path / "kept"
    folder.mkdir()
    write_spoken("llava", folder)
    config = {
        "ec_connector": "ECExampleConnector",
        "ec_connector_extra_config": {"shared_storage_path": str(kept)},
    }
    found, counts = [], []
    for _ in range(2):
        with engine(folder, ec_transfer_config=config, enforce_eager=True) as llm:
            own, ran = media_of(llm)._encoders["image"]._encoder, []
            encode = own.encode
            own.encode = lambda items, encode=encode, ran=ran: ran.append(items) or encode(items)
            found.append(answers(llm, [asked(picture(1)), asked(picture(2))]))
            counts.append(sum(map(len, ran)))
    assert found[0] == found[1] and counts == [2, 0] and len(list(kept.iterdir())) == 2


def test_steps_that_are_not_recorded_have_the_same_positions(tmp_path):
    """Decodes of one set of rows use one step again and again, with positions on three axes."""
    write_spoken("qwen2_vl", tmp_path)
    prompts = [asked(picture(1)), asked(picture(2)), asked(picture(1))]
    found = []
    for is_eager in (True, False):
        with engine(tmp_path, enforce_eager=is_eager) as llm:
            found.append(answers(llm, prompts))
    assert found[0] == found[1]
    assert found[0][0] == found[0][2]
