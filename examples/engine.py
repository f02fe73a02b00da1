"""Drive the engine step by step: requests come and go while others run."""

from quire import EngineArgs, LLMEngine, SamplingParams

engine = LLMEngine.from_engine_args(EngineArgs(max_num_seqs=4))
params = SamplingParams(temperature=0.8, seed=7, max_tokens=24)
for number, prompt in enumerate(["def main():", "if __name__ ==", "try:", "return"]):
    engine.add_request(str(number), prompt, params)

while engine.has_unfinished_requests():
    for output in engine.step():
        if output.finished:
            print(output.request_id, repr(output.outputs[0].text))
