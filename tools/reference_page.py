"""The reference pages of options and models, made from their declarations; run it to write one."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from quire.config.args.engine_options import EngineOptions
from quire.config.args.option import Option, default_of, fields_of
from quire.config.args.server_args import ServerArgs
from quire.environment import VARIABLES
from quire.models.families import architectures, family_of, summary_of

_HEAD = """\
# Engine arguments

Made from the declaration in `src/quire/config/args/engine_options.py` by
`python tools/reference_page.py docs/engine_args.md`; do not edit.

Every name is a keyword of `LLM(...)` and `EngineArgs(...)` and a flag of the command line, with
dashes for underscores. Flags that are on or off have a `--no-` twin (but for
`--disable-log-stats`). Sizes may be written as `8k` (8000) or `8K` (8192). Objects are JSON, or
dotted pieces: `--hf-overrides.rope_theta 1e6`. `--explain` prints the values that were chosen, each
with its reason.
"""
_SERVER_HEAD = """\
# Server arguments

Made from the declaration in `src/quire/config/args/server_args.py` by
`python tools/reference_page.py docs/server_args.md`; do not edit.

Every name is a flag of `quire serve`, with dashes for underscores, next to those of the engine
([engine_args.md](engine_args.md)), and a key of the file of `--config`. [server.md](server.md) says
how the server behaves.
"""
_MODELS_HEAD = """\
# Models

Made from the families in `src/quire/models/families` by
`python tools/reference_page.py docs/models.md`; do not edit.

The architecture is what config.json names under `architectures`, or where a model also takes
pictures or sound what its text is ([Models of several parts](#models-of-several-parts)); which of
its keys count is [below](#keys-of-configjson), and `quire show` prints what a model is. What is not
in the table may run [through transformers](#everything-else-through-transformers).

Each family is tested on random checkpoints in float32 (`tests/models`, all of them with `--full`):
logits of whole and of chunked passes over paged memory; greedy tokens and their log-probabilities
from the whole engine, with requests in batches and chunks, preemptions and prefix hits; each fact
of the description and each key of config.json changed, which the tests must notice. They are
compared with transformers or, where transformers does not have the family, with a reference of at
most a hundred lines in this repository (`tests/models/hostile/references.py`).

| architectures | compared with | what they are |
| --- | --- | --- |
"""
_MODELS_END = """
Within these families are refused by name: OPT 350m, whose norms come after its sub-layers; MPT
without linear biases; Kimi K3, whose activation and residual sums no public code has. Of those that
are asked for, and that no family describes, the refusal says why: Zaya, LongCat-Flash,
RWKV, and Ling 2.5 and MiMo-V2.5, whose code is their own alone.
[quantization.md](quantization.md) has the quantised checkpoints that are read, and
[weights.md](weights.md) the formats of files.

## Keys of config.json

Published files carry keys that say nothing, and others without which the answers would be wrong.
Which is which follows from what reads them:

- *Known* is a key that the family reads or that a list with reasons has
  (`src/quire/models/reading/listed.py`). It counts, and is refused at a value that is not
  implemented.
- *Neutral* is one that transformers reads and the family does not, at the default of transformers'
  class.
- *Unmet* is the same at another value. It is refused; one sentence names all of them, with an
  override that removes them.
- *Foreign* is one that neither reads. It says nothing at null, false, 0 and empty; else a warning,
  `quire show` and `--explain` list it with its value, and `--strict-config` refuses it.

What transformers reads is a table (`src/quire/models/reading/reference_keys.json`) that
`python tools/reference_keys.py` makes from the configuration classes and modelling files of its
newest version. Where transformers does not have the architecture, or the file names code of its own
for it (`auto_map`), nothing is foreign: what the family does not read is refused. A key in
`hf_overrides` that nothing reads is refused, too. One key is read as vLLM reads it, and not as
transformers: `attn_factor` of a YaRN scaling multiplies the attention factor, as the publishers of
such files mean it.

## Models of several parts

A model that also takes pictures or sound has its text under `text_config` (`llm_config`,
`language_config`), or next to `vision_config` where transformers reads it so. The text runs where
its `model_type` or `architectures` name a family of the table, whatever the whole is called: what
the file leaves out has the default of transformers' class, the tensors of the text are found by
their names behind whatever prefix they have, exactly as many as the description needs, and the
modules of other parts are left out, with their names in the log.

Where the vision encoder is known and the folder says how pictures are processed, pictures are
served as well, in `LLM.generate`, `LLM.chat` and `AsyncLLM` ([docs/media.md](media.md) has the
list); where it is not, the log of the start says why, and requests with pictures are refused.
`language_model_only=True` serves text alone and does not load the encoder. Requests with sound are
refused.

## Everything else, through transformers

With `pip install 'quire[transformers]'`, a causal language model that no family describes runs as
transformers (5 or later) has it: its modules compute, and Quire gives attention over the paged KV
cache, the products, batches, chunked prompts, prefix hits, preemption, sampling and everything that
follows. `--model-impl auto` does so for architectures that are not in the table, with a warning;
`--model-impl transformers` also for those that are; `--model-impl vllm` (or `quire`) never.
`quire show` and `--explain` name the implementation.

- **Which models.** Those whose tokens see only the tokens before them. Where attention goes through
  transformers' attention interface, over all tokens or a window, it is Quire's; a layer may call it
  several times. Positions may begin after those of padding (RoBERTa), and may be counted by the
  model's own code where it hands them to a table (decoders of BART and its kin). Where a model
  attends, makes its masks or counts positions by itself (MegatronBERT, XGLM, Doge), or has in
  transformers' own cache keys by which it chooses tokens (A.X K2, HunYuan V4) or states next to
  keys and values (Zaya, Lara, Inkling), each request of a step is computed by itself over such a
  cache, which is filled from the paged one: batches save nothing then, and each step copies what is
  kept of its requests. [Below](#names-of-transformers-mapping) are all names.
  Refused by name: caches of a model's own class, states alone, encoders and models whose tokens see
  those after them, chunks, rotary embeddings that depend on the longest sequence of a step
  (dynamic, longrope), code in the model's folder.
- **Quantised checkpoints.** Linear layers that are stored in codes (FP8 for each tensor or for
  blocks, GPTQ, AWQ, compressed-tensors, ModelOpt, bitsandbytes) multiply as they are stored.
  So do experts that files store one by one, whatever transformers makes of them; experts that files
  stack in codes are refused by name, and so are formats that store more than linear layers so (MLX,
  gpt-oss). Scales of keys and values are not used.
- **How it is known.** The model is called without weights before anything is loaded, which shows
  each layer's heads, window, scale, cap and sinks. After loading, a short text is run through
  transformers alone and, packed after another one and in two steps, through the paged cache; the
  engine does not start if the logits differ. transformers reads the safetensors files, and no
  weight may be missing or left over; keys of config.json that it does not know are ignored, as it
  ignores them.
- **What it costs.** Each step calls the model's Python code, so that short steps take longer (the
  log says how long one took at start); a CPU records no program and a GPU captures no graphs.
  transformers is imported at start, by the process that plans the engine (400 MB) and by the core.
  Weights are read to the host's memory before they are packed. Not possible: `quantization` that
  rounds weights, `deterministic`, `enable_expert_parallel`, `enable_return_routed_experts`, weights
  in mapped files, a `load_format` other than safetensors files and dummy, `save_sharded_state`,
  benchmarks against the machine's limits.
- **Which bits.** Linear layers, stacked experts and the head multiply with Quire's kernels, and
  attention is Quire's, so that on CPUs with native kernels a request has the same bits alone, in a
  crowd, in chunks, preempted and after prefix hits, where two things hold: the widths of its layers
  are multiples of 64, because torch computes the last values of an activation that is no whole
  number of vectors by another routine; and no module multiplies by itself. Where one does (the
  routers of most mixtures), start-up names the weights, and nothing is promised. With attention of
  a model's own, other requests do not change a request's bits, but how its prompt is cut into steps
  does, which start-up says.
"""
_ORACLES = {"transformers": "transformers", "reference": "a reference"}
_UNBUILT = """\
## Not built yet

These names are accepted at the values shown, at which they change nothing, so that existing calls
work. Any other value is refused by name.

| name | accepted | what it is | what to do |
| --- | --- | --- | --- |
"""
_ENVIRONMENT = """\
## Environment variables

| name | form | meaning |
| --- | --- | --- |
"""


def render() -> str:
    """The page of the engine's options as Markdown."""
    variables = "".join(f"| `{v.name}` | {v.form} | {v.help} |\n" for v in VARIABLES)
    return "\n".join([_HEAD, *_tables(EngineOptions), _ENVIRONMENT + variables])


def render_server() -> str:
    """The page of the server's options as Markdown."""
    return "\n".join([_SERVER_HEAD, *_tables(ServerArgs)])


def render_models() -> str:
    """The page of the model families as Markdown; relatives of one file share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in architectures():
        rows.setdefault((summary_of(name), family_of(name).oracle), []).append(f"`{name}`")
    table = "".join(
        f"| {', '.join(names)} | {_ORACLES[oracle]} | {summary} |\n"
        for (summary, oracle), names in rows.items()
    )
    return _MODELS_HEAD + table + _MODELS_END + _mapping() + _published()


_MAPPING = Path(__file__).parent.parent / "tests/models/causal_mapping/results.json"


def _mapping() -> str:
    """What becomes of the names of transformers' mapping."""
    found = json.loads(_MAPPING.read_text(encoding="utf-8"))
    kinds = Counter(entry["kind"] for entry in found.values())
    by_kind = {
        kind: ", ".join(f"`{name}`" for name, entry in found.items() if entry["kind"] == kind)
        for kind in kinds
    }
    both = [name for name, entry in found.items() if entry["through_transformers"] is not None]
    by_reason: dict[str, list[str]] = {}
    for name, entry in found.items():
        if entry["kind"] == "refused":
            why = entry["why"].partition(" in Quire: ")[2].partition(". Only models")[0]
            by_reason.setdefault(why or _reason(entry["why"]), []).append(f"`{name}`")
    unseen = [
        f"`{name}`"
        for name, entry in found.items()
        if entry["kind"] == "fallback" and entry["error"] is None
    ]
    note = f" Not compared, for want of a small form: {', '.join(unseen)}." if unseen else ""
    rows = "".join(
        f"| {why} | {', '.join(names)} |\n"
        for why, names in sorted(by_reason.items(), key=lambda row: -len(row[1]))
    )
    return (
        f"\n### Names of transformers' mapping\n\nOf the {len(found)} names of transformers' "
        f"causal language models, {kinds['native']} run with a family\nof Quire's, "
        f"{kinds['fallback']} through transformers, and {kinds['refused']} are refused.\n"
        "`python -m tests.models.causal_mapping.run` tries all on tiny random checkpoints: the "
        "logits in\nfloat32, in chunks among those of other requests, are those of transformers "
        "for each that runs\nthrough it (those of families are compared by their own tests), and "
        f"for {len(both)} that have a\nfamily, too. Through transformers run:\n\n"
        f"{by_kind['fallback']}.{note}\n\n| refused because | names |\n| --- | --- |\n{rows}"
    )


_PUBLISHED = Path(__file__).parent.parent / "tests/models/published_files/results.json"


def _published() -> str:
    """What became of the published files that the tests have."""
    found = json.loads(_PUBLISHED.read_text(encoding="utf-8"))
    kinds = Counter(entry["kind"] for entry in found.values())
    refused = {name: entry["why"] for name, entry in found.items() if entry["kind"] == "refused"}
    by_reason: dict[str, list[str]] = {}
    for name, why in refused.items():
        by_reason.setdefault(_reason(why), []).append(f"`{name}`")
    rows = "".join(f"| {why} | {', '.join(names)} |\n" for why, names in by_reason.items())
    starting = kinds["equal"] + kinds["starts"]
    return (
        f"\n## Published files\n\nOf {len(found)} config.json files of published models\n"
        f"(`tests/models/published_files`), {starting} are read. In small, with random weights in\n"
        f"float32, {kinds['equal']} of these have the logits of transformers; for the other\n"
        f"{kinds['starts']} it lacks the class, refuses the file or its small form, or they pool.\n"
        f"`python -m tests.models.published_files.run` tries all. {kinds['refused']} are refused,\n"
        "each for what it needs:\n\n"
        f"| why | models |\n| --- | --- |\n{rows}"
    )


def _reason(why: str) -> str:
    """The first sentence of a refusal, without what is like it."""
    first = why.partition("; the nearest")[0].partition(". ")[0]
    return first.partition(": quantization_config.config_groups")[0].removesuffix(".")


PAGES: dict[str, Callable[[], str]] = {
    "engine_args.md": render,
    "server_args.md": render_server,
    "models.md": render_models,
}
"""File name -> the page."""


def _tables(declaration: type) -> list[str]:
    fields = fields_of(declaration)
    built = [field for field in fields if _option(field).is_built]
    missing = [field for field in fields if not _option(field).is_built]
    by_group = sorted(built, key=lambda field: _first_of(built, _option(field).group))
    groups = groupby(by_group, lambda field: _option(field).group)
    unbuilt = _UNBUILT + "".join(map(_unbuilt_row, missing))
    return [*(_group(name, list(rows)) for name, rows in groups), unbuilt]


def _first_of(fields: list[dataclasses.Field[Any]], group: str) -> int:
    return next(i for i, field in enumerate(fields) if _option(field).group == group)


def _option(field: dataclasses.Field[Any]) -> Option:
    option: Option = field.metadata["option"]
    return option


def _group(name: str, fields: list[dataclasses.Field[Any]]) -> str:
    head = f"## {name}\n\n| name | value | default | meaning |\n| --- | --- | --- | --- |\n"
    return head + "".join(map(_row, fields))


def _row(field: dataclasses.Field[Any]) -> str:
    option = _option(field)
    allowed = option.allowed + (f" ({option.unit})" if option.unit else "")
    return f"| `{field.name}` | {allowed} | `{default_of(field)!r}` | {option.help} |\n"


def _unbuilt_row(field: dataclasses.Field[Any]) -> str:
    option = _option(field)
    return f"| `{field.name}` | {option.allowed} | {option.help} | {option.hint} |\n"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(PAGES[target.name](), encoding="utf-8")
