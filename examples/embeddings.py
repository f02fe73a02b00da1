"""Find the nearest of a few texts with vectors of the embedded model, which is small and was not
trained for this: any embedder takes its place.
"""

from quire import LLM

texts = [
    "def read_file(path): return open(path).read()",
    "for number in range(10): print(number)",
    "class Stack: items = []",
]

with LLM(runner="pooling", pooler_config={"pooling_type": "MEAN"}) as llm:
    vectors = [output.outputs.embedding for output in llm.embed(texts)]
    scores = llm.score("for letter in 'abc': print(letter)", texts)

print(f"{len(vectors)} vectors of {len(vectors[0])} numbers")
for score, text in sorted(zip(scores, texts, strict=True), key=lambda pair: -pair[0].outputs.score):
    print(f"{score.outputs.score:.3f}  {text}")
