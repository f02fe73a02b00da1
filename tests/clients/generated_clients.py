"""Clients that generators make of /openapi.json: each makes a chat call and reads an error.

Not in the suite, since the generators are installed in FOLDER, a folder of one's own:

    python -m venv FOLDER/python
    FOLDER/python/bin/pip install openapi-python-client
    npm install --prefix FOLDER/node typescript@5 @types/node \
        @hey-api/openapi-ts openapi-typescript openapi-fetch
    python -m tests.clients.generated_clients FOLDER

A generator that warns about a part of the document, a client that does not pass the type check, and
a call that gets something else than the right answer end the script with an error.
"""

import subprocess
import sys
from pathlib import Path

from tests.server.serve_process import serving

PYTHON_CALL = """
import sys
from generated import Client
from generated.api.chat import create_chat_completion
from generated.api.models import list_models
from generated.models import ChatReply, ChatRequest, ChatRequestMessagesItem, ErrorBody

client = Client(base_url=sys.argv[1])
print(list_models.sync(client=client).data[0].id)
question = ChatRequestMessagesItem.from_dict({"role": "user", "content": "What is a list?"})
reply = create_chat_completion.sync(
    client=client, body=ChatRequest(messages=[question], max_tokens=8, temperature=0.0)
)
assert isinstance(reply, ChatReply), reply
assert reply.choices[0].message.content and reply.usage.completion_tokens == 8
error = create_chat_completion.sync(client=client, body=ChatRequest(messages=[question], n=-1))
assert isinstance(error, ErrorBody) and error.error.param == "n", error
print(reply.choices[0].message.content)
"""

HEY_API_CALL = """
import { createChatCompletion, listModels } from "./hey";
import { client } from "./hey/client.gen";

async function main() {
  client.setConfig({ baseUrl: process.argv[2] });
  const models = await listModels({ throwOnError: true });
  console.log(models.data.data[0].id);
  const messages = [{ role: "user", content: "What is a list?" }];
  const { data } = await createChatCompletion({
    body: { messages, max_tokens: 8, temperature: 0 },
    throwOnError: true,
  });
  if (data.usage?.completion_tokens !== 8) throw new Error(JSON.stringify(data));
  console.log(data.choices[0].message.content);
  const refused = await createChatCompletion({ body: { messages, n: -1 } });
  if (refused.error?.error.param !== "n") throw new Error(JSON.stringify(refused.error));
}
main().catch((error) => { console.error(error); process.exit(1); });
"""

FETCH_CALL = """
import createClient from "openapi-fetch";
import type { paths } from "./schema";

async function main() {
  const client = createClient<paths>({ baseUrl: process.argv[2] });
  const messages = [{ role: "user", content: "What is a list?" }];
  const { data } = await client.POST("/v1/chat/completions", {
    body: { messages, max_tokens: 8, temperature: 0 },
  });
  // a stream would be text, so that the type of the reply is either
  if (typeof data !== "object" || data.usage?.completion_tokens !== 8)
    throw new Error(JSON.stringify(data));
  console.log(data.choices[0].message.content);
  const { error } = await client.POST("/v1/chat/completions", { body: { messages, n: -1 } });
  if (error?.error.param !== "n") throw new Error(JSON.stringify(error));
}
main().catch((error) => { console.error(error); process.exit(1); });
"""


def run(*command, cwd):
    """A command's output; its failure ends the script."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}:\n{done.stdout}")
    return done.stdout


def python_client(folder, url):
    """openapi-python-client: the package, then a call with it."""
    python = folder / "python" / "bin"
    said = run(
        python / "openapi-python-client", "generate", "--path", folder / "openapi.json",
        "--meta", "none", "--output-path", folder / "generated", "--overwrite", "--fail-on-warning",
        cwd=folder,
    )  # fmt: skip
    assert "warning" not in said.lower(), said
    return run(python / "python", "-c", PYTHON_CALL, url, cwd=folder)


def typescript_client(folder, url, name, call, *generator):
    """A TypeScript generator: its client, the strict type check of a program, then its run."""
    node = folder / "node"
    programs = node / "node_modules" / ".bin"
    run(programs / generator[0], *generator[1:], cwd=node)
    (node / f"{name}.ts").write_text(call)
    run(
        programs / "tsc", "--strict", "--target", "es2022", "--module", "commonjs",
        "--moduleResolution", "node10", "--ignoreDeprecations", "5.0", "--skipLibCheck",
        "--esModuleInterop", "--outDir", node / "out", f"{name}.ts",
        cwd=node,
    )  # fmt: skip
    return run("node", node / "out" / f"{name}.js", url, cwd=node)


def main(folder):
    """Generate and call, one client after the other."""
    document = folder / "openapi.json"
    with serving() as server:
        document.write_text(server.get("/openapi.json").text)
        print("openapi-python-client:", python_client(folder, server.url))
        hey_api = ("openapi-ts", "-i", document, "-o", "hey", "-c", "@hey-api/client-fetch")
        print("hey-api:", typescript_client(folder, server.url, "hey_call", HEY_API_CALL, *hey_api))
        types = ("openapi-typescript", document, "-o", "schema.ts")
        print("openapi-fetch:", typescript_client(folder, server.url, "fetch", FETCH_CALL, *types))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
