"""Adapters of a model that workers share: the bits of one worker, with rows of several adapters and
of none in the same steps.
"""

import pytest

from quire.engine.wire.messages import AdapterRef
from quire.engine.wire.output_parts import FinishReason
from quire.testing import make_checkpoint
from tests.executor.worker_cores import open_core, requests, same_bits, serve
from tests.models.adapters.made import make_adapter
from tests.support.needs import needs_native

pytestmark = needs_native
WISHES = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
FOUR_HEADS = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "intermediate_size": 128,
}
SHAPES = {
    "llama": FOUR_HEADS,
    "mixtral": FOUR_HEADS | {"num_local_experts": 5},
    "gpt2": {"n_layer": 2, "n_head": 4, "n_embd": 64},
}


@pytest.mark.parametrize("kind", [{}, {"dtype": "bfloat16", "quantization": "int8"}])
@pytest.mark.parametrize("family", SHAPES)
def test_adapters_on_several_workers(family, kind, tmp_path):
    if kind and family == "mixtral":
        pytest.skip("one of both")
    checkpoint = make_checkpoint(tmp_path / "model", SHAPES[family], family, dtype="float32")
    refs = [None]
    for number in (1, 2, 3):  # one more than slots
        folder = make_adapter(tmp_path / f"adapter{number}", checkpoint, number)
        refs.append(AdapterRef(f"adapter{number}", number, str(folder)))
    answers = []
    for num_workers in (1, 2, 4):
        core = open_core(checkpoint, num_workers, **WISHES, **kind)
        given = requests(8)
        for request in given:
            request.adapter = refs[request.handle % 4]
        answers.append(serve(core, given))
        core.shutdown()
        assert {end.reason for end in answers[-1].ends.values()} == {FinishReason.LENGTH}
    plain = open_core(checkpoint, 1, **kind)
    without = serve(plain, requests(8))
    plain.shutdown()
    assert answers[0].tokens[0] == without.tokens[0]
    assert any(answers[0].tokens[handle] != without.tokens[handle] for handle in range(8))
    assert all(same_bits(answers[0], other) for other in answers[1:])
