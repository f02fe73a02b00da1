"""A program for vLLM's offline engine; prints what it found as JSON."""

import argparse
import json

from vllm import LLM, EngineArgs, RequestOutput, SamplingParams
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.metrics.reader import Counter

PROMPTS = ["def add(a, b):", "class Stack:"]


def main(args: argparse.Namespace) -> None:
    llm = LLM(**vars(EngineArgs.from_cli_args(args)))
    greedy = SamplingParams(temperature=0.0, max_tokens=args.num_tokens, logprobs=1)
    prompts = [PROMPTS[0], TextPrompt(prompt=PROMPTS[1])]
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    assert all(isinstance(output, RequestOutput) for output in outputs)
    completion = outputs[0].outputs[0]
    assert isinstance(completion, CompletionOutput)
    assert isinstance(completion.logprobs[0][completion.token_ids[0]], Logprob)

    again = TokensPrompt(prompt_token_ids=outputs[0].prompt_token_ids)
    (repeated,) = llm.generate(again, greedy, use_tqdm=False)
    form = StructuredOutputsParams(choice=["yes", "no"])
    (chosen,) = llm.generate("?", SamplingParams(structured_outputs=form), use_tqdm=False)
    (answer,) = llm.chat([{"role": "user", "content": "hello"}], greedy, use_tqdm=False)
    (beams,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=4))
    counted = {each.name for each in llm.get_metrics() if isinstance(each, Counter)}
    found = {
        "texts": [output.outputs[0].text for output in outputs],
        "repeated": repeated.outputs[0].text,
        "chosen": chosen.outputs[0].text,
        "answered": bool(answer.outputs[0].text),
        "beams": len(beams.sequences),
        "counts": "vllm:generation_tokens" in counted,
        "max_model_len": llm.llm_engine.model_config.max_model_len,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--num-tokens", type=int, default=4)
    main(parser.parse_args())
