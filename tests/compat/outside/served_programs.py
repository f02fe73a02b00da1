"""`python -m vllm.entrypoints.openai.api_server`, started as programs start it, with TRL's client
and dspy before it.
"""

import subprocess
import sys
import time

import dspy
import requests
from trl.generation.vllm_client import VLLMClient
from vllm.utils.network_utils import get_open_port

if __name__ == "__main__":
    port = str(get_open_port())
    url = f"http://127.0.0.1:{port}"
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", sys.argv[1], "--port", port]
    server = subprocess.Popen([sys.executable, *words, "--served-model-name", "tiny"])
    try:
        client = VLLMClient(base_url=url, connection_timeout=60)
        made = client.generate([[0, 37, 225], [0, 59, 76]], n=2, max_tokens=8)
        assert [len(ids) for ids in made["completion_ids"]] == [8] * 4
        chat = client.chat([[{"role": "user", "content": "hi"}]], max_tokens=8)
        assert len(chat["completion_ids"]) == 1
        scored = client.get_sequence_logprobs([[0, 37, 225, 5]], [2], top_logprobs=1)
        assert all(value <= 0 for row in scored["actual_logprobs"] for (value,) in row)
        model = dspy.LM("hosted_vllm/tiny", api_base=f"{url}/v1", api_key="x", max_tokens=20)
        assert all(isinstance(text, str) for text in model("def add(a, b):"))
        assert requests.get(f"{url}/v1/models", timeout=10).ok
    finally:
        server.terminate()
        until = time.monotonic() + 30
        while server.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        server.kill()
