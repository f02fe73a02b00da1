"""Engines without a model: the tokens come from a script, the tokenizer is the embedded one."""

import functools

from quire import embedded
from quire.engine.frontend.frontend import FrontEnd
from quire.engine.frontend.input_processor import InputProcessor, ModelLimits
from quire.engine.frontend.output_processor import OutputProcessor
from quire.engine.llm_engine import LLMEngine
from quire.testing.scripted_core import ScriptedCore
from quire.text.tokenizer import Tokenizer


@functools.cache
def embedded_tokenizer():
    return Tokenizer.from_folder(embedded.path())


def make_engine(
    script=lambda request: [],
    *,
    tokenizer="embedded",
    max_model_len=4096,
    max_logprobs=20,
    eos_token_ids=(),
    seed=0,
    stream_interval=1,
    log_stats=False,
    sampling_defaults=None,
    **core,
):
    """An LLMEngine on a ScriptedCore, which is `engine.front_end.client`."""
    tokenizer = embedded_tokenizer() if tokenizer == "embedded" else tokenizer
    vocab_size = 1000 if tokenizer is None else tokenizer.vocab_size
    limits = ModelLimits(vocab_size, max_model_len, max_logprobs, eos_token_ids)
    front_end = FrontEnd(
        client=ScriptedCore(script, vocab_size=vocab_size, max_model_len=max_model_len, **core),
        tokenizer=tokenizer,
        inputs=InputProcessor(tokenizer, limits, seed=seed),
        outputs=OutputProcessor(tokenizer, stream_interval=stream_interval, log_stats=log_stats),
        model_name="scripted",
        log_stats=log_stats,
        sampling_defaults=sampling_defaults or {},
    )
    return LLMEngine(front_end=front_end)


def run(engine, most_steps=10_000):
    outputs = []
    for _ in range(most_steps):
        if not engine.has_unfinished_requests():
            return outputs + engine.step()
        outputs += engine.step()
    raise AssertionError("the engine does not come to an end")


def whole(outputs, kind):
    """{(request id, index): (text, ids, logprobs, cumulative, finish reason, stop reason)} at the
    end.
    """
    found = {}
    for output in outputs:
        for completion in output.outputs:
            key = output.request_id, completion.index
            text, ids, logprobs = completion.text, completion.token_ids, completion.logprobs
            if kind.name == "DELTA" and key in found:
                before = found[key]
                text, ids = before[0] + text, before[1] + ids
                logprobs = None if logprobs is None else _joined(before[2], logprobs)
            found[key] = (
                text,
                list(ids),
                logprobs,
                completion.cumulative_logprob,
                completion.finish_reason,
                completion.stop_reason,
            )
    return found


def _joined(first, second):
    both = first[:]
    both.extend(second)
    return both
