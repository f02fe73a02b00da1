"""The requests that Claude Code and Codex send, as recorded from Claude Code 2.1.197 and Codex
0.169.0 (coding_agents.py runs the programs themselves), with the texts cut to a line each so that
they fit the small model. Standard library only.
"""

import json
import urllib.error
import urllib.request

from tests.clients.scenarios import PROMPT

CLAUDE_CODE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,"
    "context-management-2025-06-27,prompt-caching-scope-2026-01-05,effort-2025-11-24",
    "x-app": "cli",
    "x-api-key": "none",
}
EPHEMERAL = {"type": "ephemeral"}
BASH = {
    "name": "Bash",
    "description": "Runs a command.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "command": {"description": "The command.", "type": "string", "enum": ["ls", "pwd"]},
            "timeout": {"description": "Milliseconds.", "type": "number"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
CLAUDE_CODE = {
    "max_tokens": 64,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197;"},
        {"type": "text", "text": "You are an agent.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "Be terse.", "cache_control": EPHEMERAL},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>None.</system-reminder>"},
                {"type": "text", "text": PROMPT, "cache_control": EPHEMERAL},
            ],
        },
        {"role": "system", "content": "Available agent types: claude."},
    ],
    "tools": [BASH],
    "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}

EXEC_COMMAND = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string", "description": "The command."}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
NAMESPACE = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Other agents.",
    "tools": [{**EXEC_COMMAND, "name": "spawn_agent"}],
}
WEB_SEARCH = {"type": "web_search", "external_web_access": False}


def _item(number, role, text):
    content = [{"type": "input_text", "text": text}]
    return {"type": "message", "id": f"msg_{number}", "role": role, "content": content}


CODEX = {
    "stream": True,
    "input": [
        _item(1, "developer", "You are a coding agent."),
        _item(2, "developer", "Skills: none."),
        _item(3, "user", "<environment_context></environment_context>"),
        _item(4, "user", PROMPT),
    ],
    "tools": [EXEC_COMMAND],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a20526-a6d1-7d03-9065-0e97f6a20dd4",
    "client_metadata": {"x-codex-installation-id": "i"},
}


def _post(url, path, body, headers=None):
    """The events of a stream, or the error's status and body."""
    sent = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), sent)
    try:
        with urllib.request.urlopen(request) as reply:
            lines = [line.decode().strip() for line in reply if line.startswith(b"data: {")]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
    return 200, [json.loads(line.removeprefix("data: ")) for line in lines]


def _claude_code(url, model, **fields):
    body = {"model": model, **CLAUDE_CODE, **fields}
    status, events = _post(url, "/v1/messages?beta=true", body, CLAUDE_CODE_HEADERS)
    assert status == 200, events
    assert events[-1]["type"] == "message_stop", events[-1]
    return events


def _codex(url, model, **fields):
    status, events = _post(url, "/v1/responses", {"model": model, **CODEX, **fields})
    assert status == 200, events
    assert events[-1]["type"] in ("response.completed", "response.incomplete"), events[-1]
    return events[-1]["response"]


def claude_code_first_request(url, model):
    _claude_code(url, model)


def claude_code_probe(url, model):
    """`HEAD /`, by which it sees whether the server is there."""
    request = urllib.request.Request(url + "/", method="HEAD")
    with urllib.request.urlopen(request) as reply:
        assert reply.status == 200


def claude_code_after_a_tool(url, model):
    """A call and its result in the history."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}}
    result = {
        "type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py", "is_error": False,
        "cache_control": EPHEMERAL,
    }  # fmt: skip
    history = [
        *CLAUDE_CODE["messages"],
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [result]},
    ]
    _claude_code(url, model, messages=history)


def claude_code_forced_tool(url, model):
    events = _claude_code(url, model, tool_choice={"type": "tool", "name": "Bash"}, max_tokens=200)
    started = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert any(block["type"] == "tool_use" and block["name"] == "Bash" for block in started)


def claude_code_token_count(url, model):
    names = ("system", "messages", "tools", "thinking")
    body = {"model": model, **{name: CLAUDE_CODE[name] for name in names}}
    status, counted = _post_json(url, "/v1/messages/count_tokens?beta=true", body)
    assert status == 200 and counted["input_tokens"] > 20, counted


def _post_json(url, path, body):
    request = urllib.request.Request(
        url + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **CLAUDE_CODE_HEADERS},
    )
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def codex_first_request(url, model):
    assert _codex(url, model, max_output_tokens=64)["output"]


def codex_after_a_tool(url, model):
    """A call and its result in the input, both with ids of the client."""
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "exec_command",
            "arguments": '{"cmd":"ls"}', "status": "completed"}  # fmt: skip
    result = {"type": "function_call_output", "call_id": "call_1", "output": "a.py"}
    history = [*CODEX["input"], call, result]
    assert _codex(url, model, input=history, max_output_tokens=64)["output"]


def codex_with_everything_on(url, model):
    """Namespaces of tools and a search of the web, which Codex sends unless it is configured not
    to, are served or refused by name.
    """
    for tool in (NAMESPACE, WEB_SEARCH):
        body = {"model": model, **CODEX, "tools": [EXEC_COMMAND, tool], "max_output_tokens": 64}
        status, answer = _post(url, "/v1/responses", body)
        if status != 200:
            assert status == 400 and tool["type"] in answer["error"]["message"], answer
