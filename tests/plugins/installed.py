"""examples/plugin where it is installed: each of its parts is seen by what it changes, in the front
end, the core and each worker. `tools/check_plugin.py` runs this in an environment of its own:

    python -m tests.plugins.installed FOLDER

FOLDER gets checkpoints and adapters. Says what was seen, a line for each part.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams, embedded
from tests.server.serve_process import serving

ADAPTERS = Path(__file__).parents[1] / "lora" / "adapters"
MODEL = {"architectures": ["AcmeForCausalLM"]}
TOKEN = 77
PROMPT = "def add(a, b):"
CALLS = '<why>so</why>On it. <call>{"name": "f", "arguments": {"a": 1}}</call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
KEY = "key"


def seen(what):
    print(f"seen: {what}", flush=True)


# one server


def check_server(workers):
    """A model, its weights, a platform, an op and a logits processor in each worker; formats of
    reasoning and calls, a route and a stat logger in the front end, and where there is one worker,
    as adapters need, a resolver.
    """
    environ = {"VLLM_PLUGINS": "acme", "ACME_PLATFORM": "1", "ACME_ADAPTERS": str(ADAPTERS)}
    environ |= {"QUIRE_ALLOW_RUNTIME_LORA_UPDATING": "1", "QUIRE_API_KEY": KEY}
    forms = {"enable_in_reasoning": True}
    flags = (
        *("--hf-overrides", json.dumps(MODEL), "--load-format", "acme"),
        *("--tool-call-parser", "acme", "--reasoning-parser", "acme", "--enable-admin"),
        *("--structured-outputs-config", json.dumps(forms)),
        *("--worker-extension-cls", "acme_quire.worker.WorkerReport"),
        *(("--enable-lora",) if workers == 1 else ("--tensor-parallel-size", str(workers))),
    )
    headers = {"Authorization": f"Bearer {KEY}"}
    with serving(*flags, environ=environ) as server, server.client(headers=headers) as client:

        def post(path, **body):
            reply = client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()

        def complete(**more):
            asked = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **more}
            return post("/v1/completions", **asked)["choices"][0]

        forced = complete(vllm_xargs={"acme_token": TOKEN}, return_token_ids=True)
        assert forced["token_ids"] == [TOKEN] * 8
        seen("logits processor: an answer of one token")
        found = client.get("/acme/tokens").json()
        assert found["model"] == "AcmeForCausalLM" and found["generated"] >= 8, found
        seen("endpoint and stat logger: the route counts tokens of AcmeForCausalLM")
        reports = post("/collective_rpc", method="acme_report")["results"]
        assert [report["rank"] for report in reports] == list(range(workers)), reports
        for report in reports:
            assert report["norms"] > 0 and report["files_read"] == 1, report
            assert report["platforms_opened"] == 1, report
        seen(f"op, load format, platform and worker extension: {reports}")
        asked = {"messages": [{"role": "user", "content": "Go."}], "tools": [TOOL]}
        chat = post("/v1/chat/completions", **asked, structured_outputs={"choice": [CALLS]})
        message = chat["choices"][0]["message"]
        [call] = message["tool_calls"]
        assert (message["reasoning"], call["function"]["name"]) == ("so", "f"), message
        seen("reasoning and tool parser: a reasoning and a call are split off")
        if workers > 1:
            return
        usual, other = complete()["text"], complete(model="acme/shout")["text"]
        assert usual != other and "acme/shout" in client.get("/v1/models").text
        absent = client.post("/v1/completions", json={"model": "acme/no", "prompt": PROMPT})
        assert absent.status_code == 404, absent.text
        seen(f"resolver of adapters: {other!r} in place of {usual!r}")


def check_pooling_server():
    """An IO processor, named by config.json."""
    overrides = json.dumps({"io_processor_plugin": "acme"})
    flags = ("--runner", "pooling", "--convert", "embed", "--hf-overrides", overrides)
    with serving(*flags) as server:
        data = {"records": [{"name": "Ada"}, {"name": "Bo", "age": 3}]}
        vectors = server.post("/pooling", {"data": data}).json()["data"]["vectors"]
        usual = server.post("/pooling", {"input": "name: Bo, age: 3"}).json()["data"][0]["data"]
        assert max(abs(a - b) for a, b in zip(vectors[1], usual, strict=True)) < 1e-5
        seen("IO processor that config.json names: vectors of records")


# engines in this process


def check_quantization(folder):
    """A checkpoint in 8-bit floats whose method only the plugin knows, beside Quire's own."""
    answers = []
    for method in ("acme-fp8", "fp8"):
        written = write_in_bytes(folder / method, method)
        with LLM(str(written), dtype="float32") as llm:
            [output] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))
            answers.append(output.outputs[0].token_ids)
            stored = llm.llm_engine.vllm_config.model.quantization
    assert answers[0] == answers[1], answers
    seen(f"quantization method: the answer of {stored}")


def write_in_bytes(folder, method):
    """The embedded model with one scale for each weight of a layer."""
    shutil.copytree(embedded.path(), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config))
    [file] = folder.glob("*.safetensors")
    tensors = {}
    for name, tensor in load_file(file).items():
        if name.endswith("_proj.weight"):
            scale = tensor.abs().max().float() / 448
            tensors[f"{name}_scale"] = scale
            tensor = (tensor.float() / scale).to(torch.float8_e4m3fn)
        tensors[name] = tensor
    save_file(tensors, file)
    return folder


def check_connector(folder):
    """Outputs of an encoder are kept by the plugin's connector, and read by a second engine."""
    from tests.models.vision.spoken import picture, write_spoken
    from tests.models.vision.test_given_rows import answers, asked
    from tests.models.vision.test_pictures import engine

    model, kept = folder / "model", folder / "kept"
    model.mkdir(parents=True)
    write_spoken("llava", model)
    config = {
        "ec_connector": "AcmeConnector",
        "ec_connector_extra_config": {"shared_storage_path": str(kept)},
    }
    found = []
    for _ in range(2):
        with engine(model, ec_transfer_config=config, enforce_eager=True) as llm:
            found.append(answers(llm, [asked(picture(1))]))
    assert found[0] == found[1] and len(list(kept.iterdir())) == 1
    seen("connector of encoder caches: one picture kept, the same answer from it")


# what fails


def check_absence(folder):
    """What the plugin brings is refused by name where VLLM_PLUGINS leaves it out."""
    code = (
        "import sys; from quire import LLM\n"
        "options = [{'load_format': 'acme'}, {'model': sys.argv[1]},\n"
        "    {'hf_overrides': {'architectures': ['AcmeForCausalLM']}}]\n"
        "for given in options:\n"
        "    try: LLM(**given)\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
        "    else: sys.exit(f'{given} is not refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, folder / "acme-fp8"], capture_output=True, text=True,
        env={**os.environ, "VLLM_PLUGINS": ""}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all("acme" in line.lower() for line in lines), lines
    seen("without the plugin:\n  " + "\n  ".join(lines))


BAD = {
    "acme_raises": "def register(): raise OSError('no licence')",
    "acme_hangs": "import time; time.sleep(3600)",
    "acme_twice": """
import quire
def register():
    for family in ("a:FAMILY", "b:FAMILY"):
        quire.ModelRegistry.register_model("TwiceForCausalLM", family)
""",
    "acme_replaces": """
import quire
def register():
    quire.ModelRegistry.register_model("LlamaForCausalLM", "a:FAMILY")
""",
}
SENTENCES = (
    r"'acme_raises' of acme_raises 1\.0 .* it failed: OSError: no licence\. The engine goes on",
    r"'acme_hangs' of acme_hangs 1\.0 .* has not come to an end in 2 s .* The engine goes on",
    r"'TwiceForCausalLM' is registered twice, by .* and by .*: one of them has to .* goes on",
    r"'LlamaForCausalLM' is Quire's own and cannot be replaced: .* The engine goes on",
)


def check_bad_plugins(folder):
    """Each is named in one sentence; the engine starts, or refuses for a logits processor."""
    for name, source in BAD.items():
        install(folder, name, source, "quire.general_plugins", "register")
    done = generate(folder)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    for sentence in SENTENCES:
        assert len(re.findall(sentence, done.stderr)) == 1, (sentence, done.stderr)
    seen("plugins that raise, hang, register twice or replace: a sentence each, and an answer")
    install(folder, "acme_gone", "import not_there", "quire.logits_processors", "Gone")
    done = generate(folder)
    [line] = [text for text in done.stderr.splitlines() if "acme_gone" in text]
    assert done.returncode not in (0, -9) and "Traceback" not in done.stderr, done.stderr
    seen(f"a logits processor that cannot be imported: {line}")


def install(folder, name, source, group, attribute):
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(source)
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}:{attribute}\n")


def generate(folder):
    command = [sys.executable, "-m", "quire.cli.main", "generate", "a", "--max-tokens", "1"]
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": paths, "QUIRE_PLUGIN_TIMEOUT": "2"}
    return subprocess.run(command, capture_output=True, text=True, env=variables, check=False)


def main():
    folder = Path(sys.argv[1])
    check_quantization(folder)
    check_absence(folder)
    check_connector(folder / "pictures")
    check_pooling_server()
    for workers in (1, 2):
        print(f"with {workers} worker{'s' * (workers > 1)}:")
        check_server(workers)
    check_bad_plugins(folder / "bad")


if __name__ == "__main__":
    main()
