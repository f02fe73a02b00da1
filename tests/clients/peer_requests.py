"""The requests that `python -m tests.clients.peer` sends to both servers: plain HTTP, with the
fields, values and mistakes of clients.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MODEL = "peer"
KEY = "peer-key"
MAX_MODEL_LEN = 512

PROMPT = "def add(a, b):"
ASKED = [{"role": "user", "content": "What is a list?"}]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["age"],
    "additionalProperties": False,
}
FUNCTION = {"name": "set_age", "description": "Set an age.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "set_age"}}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}

COMPLETION = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
CHAT = {"model": MODEL, "messages": ASKED, "max_tokens": 8, "temperature": 0}
RESPONSES = {"model": MODEL, "input": "What is a list?", "max_output_tokens": 8, "temperature": 0}
MESSAGES = {"model": MODEL, "messages": ASKED, "max_tokens": 8, "temperature": 0}
CALLING = {"tools": [TOOL], "max_tokens": 60}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}

LEFT_OUT = object()
"""As a value: the field is not sent."""


@dataclass(frozen=True)
class Exchange:
    """One request. `body`: sent as JSON, bytes as they are, None for no body. `headers` that are
    None are left out. `is_greedy`: the texts of the replies are compared, too.
    """

    name: str
    method: str
    path: str
    body: Any = None
    headers: dict[str, str | None] = field(default_factory=dict)
    is_greedy: bool = True


def exchanges() -> Iterator[Exchange]:
    """All of them, in the order in which they are sent."""
    for group, path, base, variants in GROUPS:
        for name, changes in variants.items():
            body = {**base, **changes}
            body = {key: value for key, value in body.items() if value is not LEFT_OUT}
            is_greedy = body.get("temperature") == 0 and "seed" not in body
            yield Exchange(f"{group}: {name}", "POST", path, body, is_greedy=is_greedy)
    yield from PLAIN


def _assistant(text: str) -> list[dict[str, Any]]:
    return [*ASKED, {"role": "assistant", "content": text}]


_CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_1", "type": "function",
         "function": {"name": "set_age", "arguments": '{"age": 3}'}}
    ],
}  # fmt: skip
_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "done"}

SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "stream": {"stream": True},
    "stream with usage": STREAM,
    "stream with usage in each chunk": {
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "stream_options without stream": {"stream_options": {"include_usage": True}},
    "unknown stream option": {"stream": True, "stream_options": {"include_use": True}},
    "unknown field": {"foo_bar": 1},
    "unknown field, null": {"foo_bar": None},
    "near miss max_token": {"max_token": 3},
    "near miss temprature": {"temprature": 0.3},
    "near miss top_logprob": {"top_logprob": 2},
    "null fields": {"stop": None, "n": None, "seed": None, "logprobs": None, "logit_bias": None},
    "temperature null": {"temperature": None, "max_tokens": 2},
    "model left out": {"model": LEFT_OUT},
    "model null": {"model": None},
    "model empty": {"model": ""},
    "wrong model": {"model": "gpt-4o"},
    "fields of other servers": {
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
    },
    "num_ctx": {"num_ctx": 4096},
    "max_tokens left out": {"max_tokens": LEFT_OUT, "stop": ["\n", ":"]},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens -1": {"max_tokens": -1},
    "max_tokens as text": {"max_tokens": "8"},
    "max_tokens 8.0": {"max_tokens": 8.0},
    "max_tokens 8.5": {"max_tokens": 8.5},
    "max_tokens true": {"max_tokens": True},
    "max_tokens too many": {"max_tokens": 100000},
    "max_completion_tokens": {"max_completion_tokens": 3},
    "max_completion_tokens alone": {"max_completion_tokens": 3, "max_tokens": LEFT_OUT},
    "n 2": {"n": 2},
    "n 2, stream": {"n": 2, **STREAM},
    "n 2, greedy, seed": {"n": 2, "seed": 1, "temperature": 1},
    "n 0": {"n": 0},
    "n -1": {"n": -1},
    "n 100000": {"n": 100000},
    "seed": {"seed": 7, "temperature": 0.8},
    "seed -1": {"seed": -1},
    "seed 2**63": {"seed": 2**63},
    "temperature -1": {"temperature": -1},
    "temperature 3": {"temperature": 3, "seed": 1},
    "temperature as text": {"temperature": "0"},
    "temperature 1e-9": {"temperature": 1e-9},
    "temperature 1e999": {"temperature": 1e308, "seed": 1},
    "top_p 0": {"top_p": 0},
    "top_p 1.5": {"top_p": 1.5},
    "top_k 0": {"top_k": 0},
    "top_k -1": {"top_k": -1},
    "top_k -2": {"top_k": -2},
    "top_k above the vocabulary": {"top_k": 10**6, "temperature": 0},
    "min_p 2": {"min_p": 2},
    "presence_penalty 3": {"presence_penalty": 3},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "repetition_penalty 0": {"repetition_penalty": 0},
    "logit_bias": {"logit_bias": {"5": 100}},
    "logit_bias ban": {"logit_bias": {"5": -100}},
    "logit_bias 101": {"logit_bias": {"5": 101}},
    "logit_bias outside the vocabulary": {"logit_bias": {"999999": 1}},
    "logit_bias with a name": {"logit_bias": {"x": 1}},
    "allowed_token_ids": {"allowed_token_ids": [5, 6]},
    "allowed_token_ids []": {"allowed_token_ids": []},
    "bad_words": {"bad_words": ["return"]},
    "stop": {"stop": " "},
    "stop list": {"stop": [" ", "\n"]},
    "stop []": {"stop": []},
    "stop empty string": {"stop": ""},
    "stop ['']": {"stop": [""]},
    "stop 20 strings": {"stop": [f"s{i}" for i in range(20)]},
    "stop number": {"stop": 5},
    "stop kept": {"stop": [" "], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": list(range(300, 1500)), "max_tokens": 20},
    "stop_token_ids outside": {"stop_token_ids": [10**9]},
    "stop_token_ids negative": {"stop_token_ids": [-1]},
    "min_tokens": {"min_tokens": 5},
    "min_tokens above max_tokens": {"min_tokens": 50},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 20},
    "skip_special_tokens false": {"skip_special_tokens": False},
    "spaces_between_special_tokens false": {"spaces_between_special_tokens": False},
    "detokenize false": {"detokenize": False},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 3},
    "truncate_prompt_tokens -1": {"truncate_prompt_tokens": -1},
    "truncate_prompt_tokens -2": {"truncate_prompt_tokens": -2},
    "truncate_prompt_tokens too many": {"truncate_prompt_tokens": 100000},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "prompt_logprobs 0": {"prompt_logprobs": 0},
    "prompt_logprobs -1": {"prompt_logprobs": -1, "max_tokens": 1},
    "prompt_logprobs 1000": {"prompt_logprobs": 1000},
    "prompt_logprobs, stream": {"prompt_logprobs": 1, "stream": True},
    "return_token_ids": {"return_token_ids": True},
    "return_token_ids, stream": {"return_token_ids": True, "stream": True},
    "return_tokens_as_token_ids": {"return_tokens_as_token_ids": True},
    "use_beam_search": {"use_beam_search": True, "n": 2},
    "use_beam_search, length_penalty": {"use_beam_search": True, "n": 2, "length_penalty": 0.5},
    "use_beam_search, n 1": {"use_beam_search": True},
    "use_beam_search, stream": {"use_beam_search": True, "n": 2, "stream": True},
    "use_beam_search, stop": {"use_beam_search": True, "n": 2, "stop": [" "]},
    "length_penalty alone": {"length_penalty": 0.5},
    "response_format json_schema": {"response_format": JSON_SCHEMA, "max_tokens": 30},
    "response_format json_object": {"response_format": {"type": "json_object"}, "max_tokens": 20},
    "response_format text": {"response_format": {"type": "text"}},
    "response_format unknown": {"response_format": {"type": "yaml"}},
    "response_format, schema left out": {"response_format": {"type": "json_schema"}},
    "response_format, schema invalid": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "wrong"}},
        }
    },
    "structured_outputs json": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 30},
    "structured_outputs regex": {"structured_outputs": {"regex": "[a-c]{3}"}},
    "structured_outputs choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "structured_outputs grammar": {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
    "structured_outputs json_object": {
        "structured_outputs": {"json_object": True},
        "max_tokens": 20,
    },
    "structured_outputs two forms": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    "structured_outputs {}": {"structured_outputs": {}},
    "structured_outputs, bad regex": {"structured_outputs": {"regex": "(["}},
    "structured_outputs, choice []": {"structured_outputs": {"choice": []}},
    "structured_outputs, unknown field": {"structured_outputs": {"yaml": "x"}},
    "guided_choice": {"guided_choice": ["yes", "no"]},
    "guided_json": {"guided_json": SCHEMA, "max_tokens": 30},
    "guided_regex": {"guided_regex": "[a-c]{3}"},
    "priority": {"priority": 1},
    "request_id": {"request_id": "mine"},
    "cache_salt empty": {"cache_salt": ""},
    "cache_salt": {"cache_salt": "salt"},
    "vllm_xargs": {"vllm_xargs": {"anything": 1}},
    "kv_transfer_params": {"kv_transfer_params": {"do_remote_decode": False}},
    "data_parallel_rank": {"data_parallel_rank": 0},
    "repetition_detection": {
        "repetition_detection": {"max_pattern_size": 4, "min_count": 2},
        "max_tokens": 60,
    },
    "thinking_token_budget": {"thinking_token_budget": 3},
    "user": {"user": "somebody"},
}

COMPLETIONS: dict[str, dict[str, Any]] = {
    "prompt left out": {"prompt": LEFT_OUT},
    "prompt null": {"prompt": None},
    "prompt ''": {"prompt": ""},
    "prompt []": {"prompt": []},
    "prompt ['']": {"prompt": [""]},
    "prompt number": {"prompt": 5},
    "prompts": {"prompt": [PROMPT, "class Stack:"]},
    "prompts, n 2, stream": {"prompt": [PROMPT, "class Stack:"], "n": 2, **STREAM},
    "ids": {"prompt": [0, 300, 301]},
    "lists of ids": {"prompt": [[0, 300], [0, 301]]},
    "ids outside the vocabulary": {"prompt": [10**6]},
    "ids negative": {"prompt": [-1]},
    "ids and texts": {"prompt": [5, "a"]},
    "ids in a list of lists, one empty": {"prompt": [[5], []]},
    "prompt too long": {"prompt": "word " * 2000},
    "prompt and max_tokens too long": {"max_tokens": MAX_MODEL_LEN},
    "add_special_tokens false": {"add_special_tokens": False},
    "echo": {"echo": True},
    "echo, max_tokens 0": {"echo": True, "max_tokens": 0},
    "echo, logprobs": {"echo": True, "logprobs": 1},
    "echo, logprobs, max_tokens 0": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "echo, stream": {"echo": True, "stream": True},
    "echo, stream, logprobs": {"echo": True, "stream": True, "logprobs": 1},
    "suffix": {"suffix": "end"},
    "suffix ''": {"suffix": ""},
    "best_of": {"best_of": 2},
    "best_of below n": {"best_of": 1, "n": 2},
    "best_of 1": {"best_of": 1},
    "logprobs": {"logprobs": 2},
    "logprobs 0": {"logprobs": 0},
    "logprobs -1": {"logprobs": -1},
    "logprobs 21": {"logprobs": 21},
    "logprobs true": {"logprobs": True},
    "logprobs, stream": {"logprobs": 1, "stream": True},
    "prompt_embeds": {"prompt_embeds": "AAAA"},
    "messages on completions": {"messages": ASKED},
}

CHATS: dict[str, dict[str, Any]] = {
    "messages left out": {"messages": LEFT_OUT},
    "messages []": {"messages": []},
    "messages a string": {"messages": "hello"},
    "message without role": {"messages": [{"content": "x"}]},
    "message without content": {"messages": [{"role": "user"}]},
    "unknown role": {"messages": [{"role": "critic", "content": "x"}]},
    "developer role": {"messages": [{"role": "developer", "content": "Be brief."}, *ASKED]},
    "content null": {"messages": [{"role": "user", "content": None}]},
    "content ''": {"messages": [{"role": "user", "content": ""}]},
    "content a number": {"messages": [{"role": "user", "content": 5}]},
    "content parts": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "it?"}],
            }
        ]
    },
    "content []": {"messages": [{"role": "user", "content": []}]},
    "image": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
                ],
            }
        ]
    },
    "unknown part": {"messages": [{"role": "user", "content": [{"type": "video", "x": 1}]}]},
    "unknown field of a message": {"messages": [{"role": "user", "content": "x", "foo": 1}]},
    "too long": {"messages": [{"role": "user", "content": "word " * 2000}]},
    "prompt and max_tokens too long": {"max_tokens": MAX_MODEL_LEN},
    "tools []": {"tools": []},
    "tool_choice auto without tools": {"tool_choice": "auto"},
    "tool_choice none without tools": {"tool_choice": "none"},
    "tool_choice required without tools": {"tool_choice": "required"},
    "tool_choice named without tools": {"tool_choice": NAMED},
    "tool_choice of an unknown tool": {
        **CALLING,
        "tool_choice": {"type": "function", "function": {"name": "other"}},
    },
    "tool_choice unknown word": {**CALLING, "tool_choice": "always"},
    "tools, auto": {**CALLING, "tool_choice": "auto", "max_tokens": 8},
    "tools, none": {**CALLING, "tool_choice": "none", "max_tokens": 8},
    "tools, required": {**CALLING, "tool_choice": "required"},
    "tools, required, stream": {**CALLING, "tool_choice": "required", **STREAM},
    "tools, named": {**CALLING, "tool_choice": NAMED},
    "tools, named, stream": {**CALLING, "tool_choice": NAMED, **STREAM},
    "tools, required, too short": {**CALLING, "tool_choice": "required", "max_tokens": 5},
    "tools, named, too short": {**CALLING, "tool_choice": NAMED, "max_tokens": 2},
    "tools, required, response_format": {
        **CALLING,
        "tool_choice": "required",
        "response_format": JSON_SCHEMA,
    },
    "tools, named, response_format": {
        **CALLING,
        "tool_choice": NAMED,
        "response_format": JSON_SCHEMA,
    },
    "tools, named, json_object": {
        **CALLING,
        "tool_choice": NAMED,
        "response_format": {"type": "json_object"},
    },
    "tools, auto, response_format": {**CALLING, "response_format": JSON_SCHEMA},
    "tools, parallel_tool_calls false": {
        **CALLING,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    "tool without name": {"tools": [{"type": "function", "function": {"description": "x"}}]},
    "tool without type": {"tools": [{"function": FUNCTION}]},
    "tool of unknown type": {"tools": [{"type": "web_search"}]},
    "tool, strict": {**CALLING, "tools": [{**TOOL, "function": {**FUNCTION, "strict": True}}]},
    "tool, invalid schema": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}],
        "tool_choice": "required",
    },
    "result of a tool": {"messages": [*ASKED, _CALLED, _RESULT]},
    "result without id": {"messages": [*ASKED, _CALLED, {"role": "tool", "content": "x"}]},
    "arguments not JSON": {
        "messages": [
            *ASKED,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}
                ],
            },
            _RESULT,
        ]
    },
    "functions": {"functions": [FUNCTION], "function_call": "auto"},
    "functions, named": {
        "functions": [FUNCTION],
        "function_call": {"name": "set_age"},
        "max_tokens": 60,
    },
    "allowed_tools": {
        **CALLING,
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [NAMED]},
        },
    },
    "custom tool": {"tools": [{"type": "custom", "custom": {"name": "code"}}], "max_tokens": 8},
    "max_tool_calls": {**CALLING, "max_tool_calls": 1, "max_tokens": 8},
    "logprobs": {"logprobs": True},
    "logprobs, top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "logprobs, top_logprobs, stream": {"logprobs": True, "top_logprobs": 2, "stream": True},
    "top_logprobs alone": {"top_logprobs": 2},
    "top_logprobs 0 alone": {"top_logprobs": 0},
    "top_logprobs 21": {"logprobs": True, "top_logprobs": 21},
    "top_logprobs -1": {"logprobs": True, "top_logprobs": -1},
    "logprobs 2": {"logprobs": 2},
    "prefilled": {
        "messages": _assistant("A list is"),
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "continue_final_message alone": {
        "messages": _assistant("A list is"),
        "continue_final_message": True,
    },
    "continue_final_message and add_generation_prompt": {
        "messages": _assistant("A list is"),
        "continue_final_message": True,
        "add_generation_prompt": True,
    },
    "continue_final_message after the user": {
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "last message the assistant's": {"messages": _assistant("A list is")},
    "add_generation_prompt false": {"add_generation_prompt": False},
    "echo": {
        "messages": _assistant("A list is"),
        "continue_final_message": True,
        "add_generation_prompt": False,
        "echo": True,
    },
    "reasoning_effort": {"reasoning_effort": "low"},
    "reasoning_effort unknown": {"reasoning_effort": "much"},
    "include_reasoning false": {"include_reasoning": False},
    "chat_template": {"chat_template": "{{ messages[0].content }}"},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "documents": {"documents": [{"title": "a", "text": "b"}]},
    "enable_thinking": {"enable_thinking": True},
    "modalities audio": {"modalities": ["audio"]},
    "prediction": {"prediction": {"type": "content", "content": "x"}},
    "web_search_options": {"web_search_options": {}},
    "verbosity": {"verbosity": "low"},
    "prompt_cache_retention": {"prompt_cache_retention": "24h"},
    "prompt on chat": {"prompt": "x"},
    "best_of": {"best_of": 2},
}

RESPONSES_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "stream": {"stream": True},
    "input left out": {"input": LEFT_OUT},
    "input ''": {"input": ""},
    "input []": {"input": []},
    "input items": {"input": [{"role": "user", "content": "What is a list?"}]},
    "input parts": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
        ]
    },
    "instructions": {"instructions": "Be brief."},
    "too long": {"input": "word " * 2000},
    "unknown field": {"foo_bar": 1},
    "near miss max_tokens": {"max_tokens": 3},
    "wrong model": {"model": "gpt-4o"},
    "model left out": {"model": LEFT_OUT},
    "store false": {"store": False},
    "previous_response_id unknown": {"previous_response_id": "resp_none"},
    "background": {"background": True},
    "text format": {
        "text": {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}},
        "max_output_tokens": 30,
    },
    "tool, required": {
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "required",
        "max_output_tokens": 60,
    },
    "tool, required, stream": {
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "required",
        "max_output_tokens": 60,
        "stream": True,
    },
    "tool, auto": {"tools": [{"type": "function", **FUNCTION}]},
    "web_search": {"tools": [{"type": "web_search"}]},
    "truncation auto": {"truncation": "auto"},
    "truncation auto, too long": {"truncation": "auto", "input": "word " * 2000},
    "top_logprobs": {"top_logprobs": 1, "include": ["message.output_text.logprobs"]},
    "max_output_tokens 0": {"max_output_tokens": 0},
    "temperature -1": {"temperature": -1},
    "metadata": {"metadata": {"a": "b"}},
    "reasoning": {"reasoning": {"effort": "low"}},
    "conversation": {"conversation": "conv_none"},
}

MESSAGES_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "stream": {"stream": True},
    "max_tokens left out": {"max_tokens": LEFT_OUT},
    "max_tokens 0": {"max_tokens": 0},
    "messages []": {"messages": []},
    "messages left out": {"messages": LEFT_OUT},
    "system": {"system": "Be brief."},
    "system parts": {"system": [{"type": "text", "text": "Be brief."}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    "prefilled": {"messages": _assistant("A list is")},
    "stop_sequences": {"stop_sequences": [" "], "max_tokens": 20},
    "too long": {"messages": [{"role": "user", "content": "word " * 2000}]},
    "unknown field": {"foo_bar": 1},
    "near miss": {"max_token": 3},
    "wrong model": {"model": "claude"},
    "temperature -1": {"temperature": -1},
    "temperature 2": {"temperature": 2},
    "top_k": {"top_k": 1},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "thinking disabled": {"thinking": {"type": "disabled"}},
    "metadata": {"metadata": {"user_id": "u"}},
    "tool, any": {
        "tools": [{"name": "set_age", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
        "max_tokens": 60,
    },
    "tool, any, stream": {
        "tools": [{"name": "set_age", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
        "max_tokens": 60,
        "stream": True,
    },
    "tool, named": {
        "tools": [{"name": "set_age", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "set_age"},
        "max_tokens": 60,
    },
    "tool, auto": {"tools": [{"name": "set_age", "input_schema": SCHEMA}]},
    "result of a tool": {
        "messages": [
            *ASKED,
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "t", "name": "set_age", "input": {"age": 1}}
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": "done"}],
            },
        ]
    },
    "web search": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "output_config": {
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "max_tokens": 30,
    },
}

TEXTS: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": PROMPT},
    "prompt ''": {"prompt": ""},
    "model left out": {"prompt": PROMPT, "model": LEFT_OUT},
    "wrong model": {"prompt": PROMPT, "model": "gpt-4o"},
    "add_special_tokens false": {"prompt": PROMPT, "add_special_tokens": False},
    "return_token_strs": {"prompt": PROMPT, "return_token_strs": True},
    "messages": {"messages": ASKED},
    "messages, add_generation_prompt false": {"messages": ASKED, "add_generation_prompt": False},
    "messages, tools": {"messages": ASKED, "tools": [TOOL]},
    "messages, continued": {
        "messages": _assistant("A list is"),
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "messages, continue_final_message alone": {
        "messages": _assistant("A list is"),
        "continue_final_message": True,
    },
    "messages and prompt": {"messages": ASKED, "prompt": PROMPT},
    "nothing": {},
    "prompt as a list": {"prompt": [PROMPT]},
    "longer than the context": {"prompt": "word " * 2000},
    "unknown field": {"prompt": PROMPT, "foo_bar": 1},
}

IDS: dict[str, dict[str, Any]] = {
    "tokens": {"tokens": [0, 300, 301]},
    "tokens []": {"tokens": []},
    "tokens outside": {"tokens": [10**6]},
    "tokens negative": {"tokens": [-1]},
    "tokens left out": {},
    "tokens as text": {"tokens": "12"},
}

GROUPS: tuple[tuple[str, str, dict[str, Any], dict[str, dict[str, Any]]], ...] = (
    ("completions", "/v1/completions", COMPLETION, SAMPLING),
    ("completions", "/v1/completions", COMPLETION, COMPLETIONS),
    ("chat", "/v1/chat/completions", CHAT, SAMPLING),
    ("chat", "/v1/chat/completions", CHAT, CHATS),
    ("responses", "/v1/responses", RESPONSES, RESPONSES_CASES),
    ("responses/input_tokens", "/v1/responses/input_tokens", RESPONSES, {"plain": {}}),
    ("messages", "/v1/messages", MESSAGES, MESSAGES_CASES),
    (
        "count_tokens",
        "/v1/messages/count_tokens",
        {"model": MODEL, "messages": ASKED},
        {"plain": {}, "system": {"system": "Be brief."}, "messages []": {"messages": []}},
    ),
    ("tokenize", "/tokenize", {"model": MODEL}, TEXTS),
    ("detokenize", "/detokenize", {"model": MODEL}, IDS),
    ("render", "/v1/chat/completions/render", CHAT, {"plain": {}}),
    ("render", "/v1/completions/render", COMPLETION, {"plain": {}}),
)
"""What is asked, where, the body that works, and what is changed in it."""

_CHAT_PATH = "/v1/chat/completions"
_NO_KEY: dict[str, str | None] = {"Authorization": None}

PLAIN = (
    *(
        Exchange(f"GET {path}", "GET", path)
        for path in (
            *("/health", "/ping", "/ready", "/version", "/load", "/metrics", "/server_info"),
            *("/tokenizer_info", "/v1/models", f"/v1/models/{MODEL}", "/v1/models/none", "/models"),
            *("/openapi.json", "/docs", "/", "/none", "/v1/none", "/v1/responses/resp_none"),
        )
    ),
    *(
        Exchange(f"GET {path} without a key", "GET", path, headers=_NO_KEY)
        for path in ("/health", "/metrics", "/version", "/v1/models", "/none", "/openapi.json")
    ),
    Exchange("GET with a wrong key", "GET", "/v1/models", headers={"Authorization": "Bearer no"}),
    Exchange(
        "GET with another scheme", "GET", "/v1/models", headers={"Authorization": f"Basic {KEY}"}
    ),
    Exchange(
        "GET with x-api-key", "GET", "/v1/models", headers={"Authorization": None, "x-api-key": KEY}
    ),
    Exchange("tokenize without a key", "POST", "/tokenize", {"prompt": "a"}, _NO_KEY),
    Exchange("POST /ping", "POST", "/ping"),
    Exchange("POST /health", "POST", "/health"),
    Exchange("GET chat", "GET", _CHAT_PATH),
    Exchange("PUT chat", "PUT", _CHAT_PATH, CHAT),
    Exchange("DELETE chat", "DELETE", _CHAT_PATH),
    Exchange("OPTIONS chat", "OPTIONS", _CHAT_PATH),
    Exchange("HEAD models", "HEAD", "/v1/models"),
    Exchange(
        "CORS preflight", "OPTIONS", _CHAT_PATH,
        headers={"Origin": "http://a.test", "Access-Control-Request-Method": "POST"},
    ),
    Exchange("chat with a slash at its end", "POST", f"{_CHAT_PATH}/", CHAT),
    Exchange("chat without /v1", "POST", "/chat/completions", CHAT),
    Exchange("malformed JSON", "POST", _CHAT_PATH, b'{"model": "peer", '),
    Exchange("empty body", "POST", _CHAT_PATH, b""),
    Exchange("body null", "POST", _CHAT_PATH, b"null"),
    Exchange("body a list", "POST", _CHAT_PATH, b"[]"),
    Exchange("body not UTF-8", "POST", _CHAT_PATH, b'{"model": "\xff"}'),
    Exchange("body NaN", "POST", _CHAT_PATH, b'{"temperature": NaN, "messages": []}'),
    Exchange("no content type", "POST", _CHAT_PATH, CHAT, {"Content-Type": None}),
    Exchange("content type text", "POST", _CHAT_PATH, CHAT, {"Content-Type": "text/plain"}),
    Exchange(
        "content type form", "POST", _CHAT_PATH, CHAT,
        {"Content-Type": "application/x-www-form-urlencoded"},
    ),
    Exchange("X-Request-Id", "POST", _CHAT_PATH, CHAT, {"X-Request-Id": "my-id"}),
    Exchange("embeddings", "POST", "/v1/embeddings", {"model": MODEL, "input": "x"}),
    Exchange("score", "POST", "/score", {"model": MODEL, "text_1": "a", "text_2": "b"}),
    Exchange(
        "load_lora_adapter", "POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}
    ),
    Exchange("sleep", "POST", "/sleep"),
    Exchange("cancel an unknown response", "POST", "/v1/responses/resp_none/cancel"),
    Exchange("conversations", "POST", "/v1/conversations", {}),
    Exchange("message batches", "GET", "/v1/messages/batches"),
)  # fmt: skip
"""Requests of other routes, of headers, and of bodies that are no JSON objects."""
