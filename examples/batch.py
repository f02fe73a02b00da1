"""Answers to the requests in a file: `quire run-batch`, which goes on where it was interrupted."""

import json
import tempfile
from pathlib import Path

from quire.cli.main import main

questions = ["Write a function that adds two numbers.", "Write a class for a stack."]

with tempfile.TemporaryDirectory() as folder:
    requests, results = Path(folder, "requests.jsonl"), Path(folder, "results.jsonl")
    with requests.open("w") as file:
        for number, question in enumerate(questions):
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": 30}
            line = {"custom_id": f"question {number}", "method": "POST"}
            line |= {"url": "/v1/chat/completions", "body": body}
            print(json.dumps(line), file=file)
    main(["run-batch", "-i", str(requests), "-o", str(results)])
    for text in results.read_text().splitlines():
        result = json.loads(text)
        answer = result["response"]["body"]["choices"][0]["message"]["content"]
        print(result["custom_id"], "->", answer.splitlines()[0])
