"""AsyncLLM without a model: a scripted core stepped inside the event loop."""

import asyncio

from quire.engine.async_llm import AsyncLLM
from quire.engine.frontend.admission import QueueLimits
from quire.engine.frontend.frontend import FrontEnd
from quire.engine.frontend.input_processor import InputProcessor, ModelLimits
from quire.engine.frontend.output_processor import OutputProcessor
from quire.testing.loop_client import LoopClient
from quire.testing.scripted_core import ScriptedCore
from tests.engine.frontend.scripted_engines import embedded_tokenizer


def make_async(
    script=lambda request: list(range(10, 60)), *, limits=(100, 10_000), log_stats=False, **core
):
    """An AsyncLLM; `engine.front_end.client.inner` is its ScriptedCore."""
    tokenizer = embedded_tokenizer()
    inner = ScriptedCore(script, vocab_size=tokenizer.vocab_size, max_model_len=4096, **core)
    client = LoopClient(inner, lambda: bool(inner.requests or inner._ended))
    front_end = FrontEnd(
        client=client,
        tokenizer=tokenizer,
        inputs=InputProcessor(tokenizer, ModelLimits(tokenizer.vocab_size, 4096), seed=0),
        outputs=OutputProcessor(tokenizer, log_stats=log_stats),
        model_name="scripted",
        log_stats=log_stats,
    )
    return AsyncLLM(front_end=front_end, limits=QueueLimits(*limits), log_requests=False)


def core_of(engine):
    return engine.front_end.client.inner


async def collect(engine, request_id, prompt=(4,), **params):
    from quire.params import SamplingParams

    stream = engine.generate(list(prompt), SamplingParams(**params), request_id)
    return [output async for output in stream]


def looped(test):
    def runs(*args, **kwargs):
        return asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    runs.__name__, runs.__doc__ = test.__name__, test.__doc__
    runs.__wrapped__ = test
    return runs
