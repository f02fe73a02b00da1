"""Helpers of clients for tensors as bytes, beside what the server sends."""

import base64
import io

import pytest
import torch

from quire.as_vllm import encodings
from quire.server.pooling.vectors import as_bytes

NUMBERS = torch.tensor([[1.5, -0.1, 3e-5], [448.0, -2.75, 0.0]])


@pytest.mark.parametrize("endianness", encodings.ENDIANNESS)
@pytest.mark.parametrize("dtype", encodings.EMBED_DTYPES)
def test_vectors_that_the_server_sends_are_read(dtype, endianness):
    sent = as_bytes(NUMBERS.numpy(), dtype, endianness)
    items = encodings.build_metadata_items(dtype, endianness, (3,), 2)
    found = torch.stack(encodings.decode_pooling_output(items, sent))
    assert found.dtype == encodings.EMBED_DTYPES[dtype].torch_dtype
    assert torch.equal(found.float(), NUMBERS.to(found.dtype).float())
    assert encodings.tensor2binary(NUMBERS, dtype, endianness) == sent


def test_bytes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="reshape"):
        encodings.binary2tensor(b"1234", (2,), "float32", "native")
    with pytest.raises(KeyError, match="middle"):
        encodings.binary2tensor(b"1234", (1,), "float32", "middle")


def test_prompt_embeddings_are_what_torch_loads():
    text = encodings.tensor2base64(NUMBERS)
    assert torch.equal(torch.load(io.BytesIO(base64.b64decode(text))), NUMBERS)
