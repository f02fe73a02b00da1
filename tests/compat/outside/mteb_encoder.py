"""mteb's encoder for vLLM; the model is one that pools, such as the folder of MiniLM."""

import sys

import mteb
from mteb.models.vllm_wrapper import VllmEncoderWrapper
from torch.utils.data import DataLoader

if __name__ == "__main__":
    encoder = VllmEncoderWrapper(model=sys.argv[1], dtype="float32")
    texts = DataLoader([{"text": "a cat"}, {"text": "a kitten"}, {"text": "tax law"}], batch_size=3)
    task = mteb.get_task("STS12").metadata
    cat, kitten, law = encoder.encode(texts, task_metadata=task, hf_split="", hf_subset="")
    assert cat @ kitten > cat @ law
