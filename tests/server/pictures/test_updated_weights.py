"""Pictures across an update of the language model's weights: neither blocks nor the outputs of
encoders of before are found after it.
"""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.distributed.shared_buffer import SharedBuffer
from tests.executor.weight_transfer.test_updates import described
from tests.server.pictures.pictured import TEMPLATE, data_url, image, png, text, write_model

FILE = "model.safetensors"


def opened(folder):
    return LLM(
        str(folder), dtype="float32", max_model_len=128, block_size=4, chat_template=TEMPLATE,
        kv_cache_memory_bytes=1 << 22, weight_transfer_config={"backend": "ipc"},
    )  # fmt: skip


def asked(llm):
    """Tokens, log-probabilities, and how many of the prompt's were found in blocks."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    parts = [text("look "), image(data_url(png(1)))]
    [output] = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    completion = output.outputs[0]
    return completion.token_ids, completion.logprobs, output.num_cached_tokens


def update(llm, pairs):
    buffer = SharedBuffer(sum(tensor.nbytes for _, tensor in pairs))
    at = 0
    for _, tensor in pairs:
        buffer.write(at, tensor)
        at += tensor.nbytes
    llm.update_weights({"update_info": described(pairs) | {"ipc_handles": buffer.handle()}})
    buffer.close()


@pytest.mark.full
def test_pictures_meet_the_new_weights(tmp_path):
    folders = [tmp_path / "old", tmp_path / "new"]
    write_model(folders[0])
    shutil.copytree(*folders)
    new = load_file(folders[0] / FILE)
    chosen = [name for name in new if "language_model" in name and "layers" in name]
    for name in chosen:
        new[name] = new[name] * 1.1
    save_file(new, folders[1] / FILE, {"format": "pt"})
    right = asked(opened(folders[1]))
    llm = opened(folders[0])
    llm.init_weight_transfer_engine({"init_info": {}})
    first = asked(llm)
    assert first[:2] != right[:2] and asked(llm)[2]
    update(llm, [(name, new[name]) for name in chosen])
    found = asked(llm)
    assert found[:2] == right[:2] and not found[2]
    assert asked(llm)[2]
    assert asked(llm)[:2] == right[:2]
