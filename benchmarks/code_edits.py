"""How many drafts are right when code is written again with a name changed: the embedded model.

    python benchmarks/code_edits.py

The prompt shows some code of code_edits.txt and then its first line with the new name. "Free" is
what the model says next; it is too small to write the edit down, so "edit" has it draw the tokens
of the edit, through a logits processor, which is the text that a good model would write.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from quire import LLM, AdapterLogitsProcessor, SamplingParams, embedded

RENAMES = (("settings", "options"), ("Cache", "Store"), ("left", "first"))
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
    "auto": {"method": "auto", "prompt_lookup_min": 1, "prompt_lookup_max": 4},
    "eagle3": {"method": "eagle3", "model": str(embedded.draft_head())},
}
FREE_TOKENS = 256


class Dictation(AdapterLogitsProcessor):
    """A request with `dictated` ids in its extra_args says them."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        ids = (params.extra_args or {}).get("dictated")
        return None if ids is None else lambda output, logits: _only(logits, ids[len(output)])


def _only(logits: Tensor, token: int) -> Tensor:
    kept = logits[token].item()
    logits.fill_(float("-inf"))
    logits[token] = kept
    return logits


def requests(tokenizer: Any) -> Iterator[tuple[str, dict[str, Any], SamplingParams]]:
    """Every prompt, free and dictated."""
    codes = Path(__file__).with_suffix(".txt").read_text("utf-8").split("\n\n\n")
    for code, (old, new) in zip(codes, RENAMES, strict=True):
        first, rest = code.strip().replace(old, new).split("\n", 1)
        task = f'{code.strip()}\n\n# The same with "{new}" instead of "{old}":\n\n{first}\n'
        prompt = {"prompt_token_ids": tokenizer.encode(task)}
        edit = tokenizer.encode(rest, add_special_tokens=False)
        for kind, length, extra in (
            ("free", FREE_TOKENS, None),
            ("edit", len(edit), {"dictated": edit}),
        ):
            yield (
                kind,
                prompt,
                SamplingParams(
                    temperature=0.0,
                    max_tokens=length,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args=extra,
                ),
            )


def measure(name: str, num_tokens: int) -> None:
    """Print a row for each kind: sums over the prompts, one after the other."""
    llm = LLM(
        speculative_config={
            **METHODS[name],
            "num_speculative_tokens": num_tokens,
            "num_speculative_tokens_per_batch_size": [[1, 1, num_tokens]],
        },
        per_request_spec_decode_metrics="summary",
        logits_processors=[Dictation],
        enable_prefix_caching=False,
        max_num_seqs=1,
    )
    sums: dict[str, list[int]] = {}
    for kind, prompt, params in requests(llm.get_tokenizer()):
        [output] = llm.generate([prompt], params, use_tqdm=False)
        dictated = (params.extra_args or {}).get("dictated")
        assert dictated in (None, list(output.outputs[0].token_ids)), "it said something else"
        found = output.outputs[0].spec_decode_metrics.to_dict()
        counts = [
            params.max_tokens,
            found["num_spec_steps"],
            found["num_draft_tokens"],
            found["num_accepted_draft_tokens"],
        ]
        sums[kind] = [a + b for a, b in zip(sums.get(kind, [0] * 4), counts, strict=True)]
    for kind, (tokens, steps, drafts, accepted) in sums.items():
        print(
            f"| {name} | {num_tokens} | {kind} | {accepted / max(1, drafts):.0%} | "
            f"{1 + accepted / max(1, steps):.2f} | {tokens / (tokens - accepted):.2f} |",
            flush=True,
        )


def main() -> None:
    """One engine after the other."""
    print("| method | drafts | text | acceptance rate | mean acceptance length | tokens per step |")
    print("| --- " * 6 + "|")
    for name in METHODS:
        for num_tokens in (3, 5):
            measure(name, num_tokens)


if __name__ == "__main__":
    main()
