"""A conversation of two turns."""

from quire import LLM, SamplingParams

messages = [{"role": "user", "content": "Write a function that reads a file."}]
params = SamplingParams(temperature=0.0, max_tokens=40)

with LLM() as llm:
    for question in (None, "Now close it."):
        if question is not None:
            messages.append({"role": "user", "content": question})
        [output] = llm.chat(messages, params, use_tqdm=False)
        answer = output.outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        print(answer)
        print("-" * 40)
