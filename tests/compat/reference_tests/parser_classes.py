"""vLLM's classes of tool and reasoning parsers over Quire's output parsing, and the few modules
that its test helpers need, for phantoms.py.
"""

import ast
import contextlib
import copy
import functools
import itertools
import os
import sys
import types
from pathlib import Path

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from quire.server import output_parsing

SOURCE = Path(os.environ["REFERENCE_SOURCE"])
CHECKPOINTS = Path(os.environ["REFERENCE_CHECKPOINTS"])
PHANTOMS = None


class Fields:
    """An object with attributes, in place of vLLM's pydantic models."""

    DEFAULTS = {}

    def __init__(self, **given):
        for base in reversed(type(self).__mro__):
            for name, default in getattr(base, "DEFAULTS", {}).items():
                setattr(self, name, default() if callable(default) else default)
        for name, value in given.items():
            setattr(self, name, value)

    def __eq__(self, other):
        return isinstance(other, Fields) and vars(self) == vars(other)

    __hash__ = None

    def __repr__(self):
        return f"{type(self).__name__}{vars(self)}"

    def model_dump(self, **options):
        return plain(self)

    @classmethod
    def model_validate(cls, given):
        return cls(**given)


def plain(value):
    if isinstance(value, Fields):
        return {name: plain(each) for name, each in vars(value).items()}
    if hasattr(value, "model_dump") and not isinstance(value, type):
        return value.model_dump()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value


class FunctionCall(Fields):
    DEFAULTS = {"name": None, "arguments": ""}


class ToolCall(Fields):
    DEFAULTS = {"id": None, "type": "function", "function": None}


class DeltaFunctionCall(Fields):
    DEFAULTS = {"name": None, "arguments": None}


class DeltaToolCall(Fields):
    DEFAULTS = {"id": None, "type": None, "index": 0, "function": None}


class DeltaMessage(Fields):
    DEFAULTS = {"role": None, "content": None, "reasoning": None, "tool_calls": list}


class ExtractedToolCallInformation(Fields):
    DEFAULTS = {"tools_called": False, "tool_calls": list, "content": None}


class FunctionDefinition(Fields):
    DEFAULTS = {"name": None, "description": None, "parameters": None}


class ChatCompletionToolsParam(Fields):
    DEFAULTS = {"type": "function", "function": None}

    def __init__(self, **given):
        super().__init__(**given)
        if isinstance(self.function, dict):
            self.function = FunctionDefinition(**self.function)


class ChatCompletionNamedFunction(Fields):
    pass


class ChatCompletionNamedToolChoiceParam(Fields):
    DEFAULTS = {"type": "function"}


class ChatCompletionRequest(Fields):
    DEFAULTS = {
        "messages": list, "model": None, "tools": None, "tool_choice": "auto",
        "skip_special_tokens": True, "include_reasoning": True, "parallel_tool_calls": True,
        "response_format": None, "structured_outputs": None, "chat_template_kwargs": None,
    }  # fmt: skip

    def __init__(self, **given):
        super().__init__(**given)
        self.tools = self.tools and [
            ChatCompletionToolsParam(**tool)
            if isinstance(tool, dict) and "function" in tool
            else tool
            for tool in self.tools
        ]


class ResponsesRequest(ChatCompletionRequest):
    pass


WHOLE_OUTPUTS = {"openai": "openai_gptoss", "muse_glimmer": "muse_glimmer", "inkling": "inkling"}
"""The reasoning formats of the tool formats that describe whole outputs."""


# parsers


def plan_of(tool, reasoning):
    known = ((tool, output_parsing.TOOL_PARSERS), (reasoning, output_parsing.REASONING_PARSERS))
    for name, names in known:
        if name is not None and name not in names:
            raise PHANTOMS.PhantomUsed(f"{PHANTOMS.MARK}parser.{name}")
    return output_parsing.plan_parsers(tool, WHOLE_OUTPUTS.get(tool, reasoning))


class ToolParser:
    NAME = None
    supports_required_and_named = True

    def __init__(self, tokenizer=None, tools=None, **options):
        self.plan = plan_of(self.NAME, None)
        self.model_tokenizer, self.tools, self.stream = tokenizer, tools, None
        self.prev_tool_call_arr, self.streamed_args_for_tool = [], []

    @property
    def vocab(self):
        return self.model_tokenizer.get_vocab()

    def adjust_request(self, request):
        return request

    def _tools(self, request):
        return [plain(tool) for tool in getattr(request, "tools", None) or self.tools or []]

    def extract_tool_calls(self, model_output, request=None, **options):
        parsed = self.plan.read(model_output, tools=self._tools(request))
        calls = [
            ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in parsed.tool_calls
        ]
        return ExtractedToolCallInformation(
            tools_called=bool(calls), tool_calls=calls, content=parsed.content
        )

    def delta_of(self, events):
        content, reasoning, calls = "", "", {}
        for event in events:
            if isinstance(event, output_parsing.ContentText):
                content += event.text
            elif isinstance(event, output_parsing.ReasoningText):
                reasoning += event.text
            elif isinstance(event, output_parsing.CallStarted):
                function = DeltaFunctionCall(name=event.name, arguments="")
                calls[event.index] = DeltaToolCall(
                    index=event.index, id=event.id, type="function", function=function
                )
                self.prev_tool_call_arr.append({"name": event.name, "arguments": {}})
                self.streamed_args_for_tool.append("")
            else:
                call = calls.setdefault(
                    event.index,
                    DeltaToolCall(index=event.index, function=DeltaFunctionCall(arguments="")),
                )
                call.function.arguments += event.text
                self.streamed_args_for_tool[event.index] += event.text
        if not (content or reasoning or calls):
            return None
        return DeltaMessage(
            content=content or None, reasoning=reasoning or None, tool_calls=list(calls.values())
        )

    def extract_tool_calls_streaming(
        self, previous_text=None, current_text=None, delta_text=None, previous_token_ids=(),
        current_token_ids=(), delta_token_ids=(), request=None,
    ):  # fmt: skip
        is_first = not previous_text and current_text and current_text == delta_text
        if self.stream is None or is_first:
            self.stream = self.plan.open(tools=self._tools(request))
            if previous_text:
                self.stream.feed(previous_text)
        return self.delta_of(self.stream.feed(delta_text))

    def finish_stream(self):
        if self.stream is None:
            return None
        stream, self.stream = self.stream, None
        return self.delta_of(stream.finish())

    finish_streaming = finish_stream


WITHIN = ("before", "again", "assumed", "label", "reasoning")
"""The places of Quire's parser before the end of a reasoning."""
ENDED_UNLESS_OPENED = ("gemma4", "hy_v3")
"""Formats whose tests call a reasoning ended that nothing has opened."""
KIMI_K3_TEXTS = {1: "<|open|>", 2: "think", 3: "<|sep|>", 4: "<|close|>"}
"""The texts of the ids of a tokenizer of these tests that cannot decode."""
CALLS_OF = {"qwen3": "qwen3_coder"}
"""The tool formats whose calls end the reasoning in the tests of these formats."""


class ReasoningParser:
    NAME = None

    def __init__(self, tokenizer=None, *args, chat_template_kwargs=None, **options):
        self.plan = plan_of(CALLS_OF.get(self.NAME), self.NAME)
        self.model_tokenizer, self.stream, self.thought, self.is_called = tokenizer, None, "", False
        self.place = self._place_for(chat_template_kwargs)
        self.calls = ToolParser.__new__(ToolParser)
        self.calls.prev_tool_call_arr, self.calls.streamed_args_for_tool = [], []

    def _place_for(self, asked):
        """The place that the arguments of a chat template say; None where they do not."""
        asked = asked or {}
        is_off = asked.get("enable_thinking") is False or asked.get("thinking") is False
        is_off = is_off or asked.get("reasoning_effort") == "no_think"
        is_on = asked.get("reasoning_effort") or asked.get("thinking_mode") == "enabled"
        is_on = is_on or self.NAME == "k2_horizon"
        return "answer" if is_off else "again" if is_on else None

    @property
    def vocab(self):
        return self.model_tokenizer.get_vocab()

    def extract_reasoning(self, model_output=None, request=None, **options):
        self.place = self._place_for(getattr(request, "chat_template_kwargs", None)) or self.place
        where = self._where(model_output)
        parsed = self.plan.read(model_output, where, tools=[])
        if parsed.tool_calls and parsed.content is None:
            return parsed.reasoning, model_output.partition(parsed.reasoning or "")[2]
        asked = getattr(request, "chat_template_kwargs", None) or {}
        fills = asked.get("force_nonempty_content") is True
        parsed = self.plan.read(model_output, where, tools=None, fills_answer=fills)
        return parsed.reasoning, parsed.content

    def extract_reasoning_streaming(
        self, previous_text=None, current_text=None, delta_text=None, *args, **options
    ):
        is_first = not previous_text and current_text and current_text == delta_text
        if self.stream is None or is_first:
            self.stream = self.plan.open(self._where(current_text), tools=[])
            if previous_text:
                self.delta_of(self.stream.feed(previous_text))
        return self.delta_of(self.stream.feed(delta_text), current_text, delta_text)

    extract_reasoning_content = extract_reasoning
    extract_reasoning_content_streaming = extract_reasoning_streaming

    def _where(self, text):
        """These tests stand for prompts that end with <think> where the output lacks it."""
        reasoning = self.plan.reasoning
        marks = (*reasoning.starts, *reasoning.answer_tags)
        begins = any(mark.startswith(text.lstrip()[: len(mark)]) for mark in marks)
        is_open = not begins and reasoning.name in ("qwen3", "granite_thinking_parser", "kimi_k3")
        return "again" if self.place is None and is_open else self.place

    finish_stream = ToolParser.finish_stream

    def is_reasoning_end(self, input_ids):
        """Whether Quire's parser of an output, or of a prompt's end, has met the end of the last
        reasoning.
        """
        text = self._text(input_ids)
        place = "answer" if self.place == "answer" else self.plan.place(text)
        if place in ("again", "answer"):
            return place == "answer"
        rest = min((text.rpartition(start)[2] for start in self.plan.reasoning.starts), key=len)
        stream = self.plan.open("again" if rest != text else self._where(text), tools=None)
        stream.feed(rest)
        if rest == text and self.NAME in ENDED_UNLESS_OPENED:
            return stream.place not in ("again", "label", "reasoning")
        is_left = any(mark in rest for mark in self.plan.reasoning.ends_before)
        return stream.place not in WITHIN and (is_left or self._has_end(rest))

    def is_reasoning_end_streaming(self, input_ids, delta_ids):
        text = self._text(input_ids)
        stream = self.plan.open(self._where(text), tools=None)
        stream.feed(text)
        is_answer = stream.place not in WITHIN and not self._has_end(text)
        return is_answer and bool(text) or self.is_reasoning_end(input_ids)

    def extract_content_ids(self, input_ids):
        """The ids after the one with which Quire's parser leaves the reasoning."""
        text = self._text(input_ids)
        stream = self.plan.open(self._where(text), tools=None)
        for number, token in enumerate(input_ids, 1):
            stream.feed(self._text([token]))
            if stream.place not in WITHIN:
                return list(input_ids[number:] if self._has_end(text) else input_ids)
        return []

    def count_reasoning_tokens(self, token_ids):
        """The ids whose text Quire's parser takes for reasoning."""
        text = self._text(token_ids)
        thought = self.plan.read(text, self._where(text), tools=None).reasoning or ""
        begin, at, count = text.find(thought), 0, 0
        for token in token_ids:
            start, at = at, at + len(self._text([token]))
            count += start < begin + len(thought) and at > begin
        return count

    def _has_end(self, text):
        return any(end in text for end in self.plan.reasoning.ends)

    def _text(self, tokens):
        if not tokens or isinstance(tokens[0], str):
            return self.model_tokenizer.convert_tokens_to_string(list(tokens)) if tokens else ""
        if hasattr(self.model_tokenizer, "decode"):
            return self.model_tokenizer.decode(list(tokens))
        shown = (token if token > 32 else 0x2460 + token for token in tokens)  # none is a blank
        return "".join(KIMI_K3_TEXTS.get(t) or chr(c) for t, c in zip(tokens, shown, strict=True))

    def delta_of(self, events, current_text="", delta_text=""):
        """vLLM's parsers of reasoning hand the text of calls on, to be read by another one."""
        found = self.calls.delta_of(events)
        if self.is_called:
            return DeltaMessage(content=delta_text)
        self.thought += (found and found.reasoning) or ""
        if found is None or not found.tool_calls:
            return found
        self.is_called = True
        return DeltaMessage(content=current_text.partition(self.thought)[2])

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        PHANTOMS.use(f"vllm.reasoning.ReasoningParser.{name}")


CLASSES = {}


def class_of(base, name, title):
    """The one class of that title, which may have several names."""
    return CLASSES.setdefault((base, title), type(title, (base,), {"NAME": name}))


def table_in(path, name):
    """A table that is a literal in one of vLLM's files, which is read and not run."""
    for node in ast.parse((SOURCE / path).read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if getattr(targets[0], "id", None) == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)


def manager_of(table, base, verb):
    def get(name):
        if name not in table:
            raise KeyError(name)
        return class_of(base, name, table[name][1])

    names = {verb: staticmethod(get), "list_registered": staticmethod(lambda: list(table))}
    return type("Manager", (), names)


# modules


def register(adapted, phantoms):
    """Fill `adapted` with the makers of modules."""
    global PHANTOMS
    PHANTOMS = phantoms

    def add(module, **names):
        def make():
            made = phantoms.PhantomModule(module)
            vars(made).update(names)
            return made

        adapted[module] = make

    calls = {
        kind.__name__: kind
        for kind in (
            FunctionCall, ToolCall, DeltaFunctionCall, DeltaToolCall, DeltaMessage,
            ExtractedToolCallInformation, FunctionDefinition,
        )
    }  # fmt: skip
    chat = {
        kind.__name__: kind
        for kind in (
            ChatCompletionRequest, ChatCompletionToolsParam, ChatCompletionNamedFunction,
            ChatCompletionNamedToolChoiceParam,
        )
    }  # fmt: skip
    add("vllm.entrypoints.generate.base.protocol", **calls)
    add("vllm.entrypoints.openai.chat_completion.protocol", **calls, **chat)
    parsers = (
        ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER", ToolParser, "abstract_tool_parser"),
        ("reasoning", "_REASONING_PARSERS_TO_REGISTER", ReasoningParser, "abs_reasoning_parsers"),
    )
    adapters = {}
    for package, variable, base, abstract in parsers:
        title = base.__name__
        table = table_in(f"vllm/{package}/__init__.py", variable)
        verb = "get_tool_parser" if base is ToolParser else "get_reasoning_parser"
        names = {title: base, f"{title}Manager": manager_of(table, base, verb)}
        add(f"vllm.{package}", **names)
        add(f"vllm.{package}.{abstract}", **names)
        of_file = {}
        for name, (file, own) in table.items():
            of_file.setdefault(file, {}).setdefault(own, class_of(base, name, own))
            adapters[own] = class_of(base, name, own)
        for file, classes in of_file.items():
            add(f"vllm.{package}.{file}", **classes)
    add("vllm.parser.engine.registered_adapters", **adapters)
    granite = class_of(ToolParser, "granite4", "Granite4ToolParser")
    add("vllm.tool_parsers.granite4_tool_parser", Granite4ToolParser=granite)
    for part in ("embed", "pooling", "classify", "scoring"):
        add(f"vllm.entrypoints.pooling.{part}.protocol", **dict.fromkeys(REPLIES, Reply))
    for kind in ("Image", "Video", "Audio"):
        add(f"vllm.assets.{kind.lower()}", **{f"{kind}Asset": Asset})
    marks = {"TOOL_CALL_START": "<|tool_call>", "TOOL_CALL_END": "<tool_call|>"}
    add("vllm.parser.gemma4", **marks)
    detokenizer = "vllm.tokenizers.detokenizer_utils"
    adapted[detokenizer] = their_own(detokenizer)
    add("vllm.entrypoints.cli.serve", ServeSubcommand=ServeSubcommand)
    add("vllm.transformers_utils.utils", maybe_model_redirect=lambda model: model)
    add("vllm.transformers_utils.repo_utils", hf_api=hub, with_retry=lambda f, *a, **k: f())
    phantoms.ensure("vllm.utils.torch_utils").set_default_torch_num_threads = with_threads
    platforms = phantoms.ensure("vllm.platforms")
    platforms.current_platform = Platform(platforms.current_platform)
    use_stand_in_tokenizers()


ON_ANY_DEVICE = ("test_async_llm.py", "test_engine_core.py", "test_engine_core_client.py")
"""Files of tests that skip themselves where there is no GPU, which they need for nothing."""


class Platform:
    """Quire's platform, which says no to what else vLLM's helpers of tests ask."""

    def __init__(self, ours):
        self.ours = ours

    def is_cuda(self):
        asks = sys._getframe(1).f_code.co_filename
        return asks.endswith(ON_ANY_DEVICE) or self.ours.is_cuda()

    is_cuda_alike = is_cuda

    def __getattr__(self, name):
        if name == "fp8_dtype":
            return lambda: torch.float8_e4m3fn
        return getattr(self.ours, name, lambda *args, **options: False)


def their_own(module):
    """A maker of vLLM's own module, which its tests use as a client of its server does: to cut a
    text as a server sends it.
    """

    def make():
        path = SOURCE / f"{module.replace('.', '/')}.py"
        made = types.ModuleType(module)
        made.__file__, made.__path__ = str(path), []
        sys.modules[module] = made  # its dataclasses look there
        exec(compile(path.read_text(encoding="utf-8"), path, "exec"), vars(made))
        return made

    return make


@contextlib.contextmanager
def with_threads(num_threads=None):
    """vLLM's tests of the engine start one so."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class ServeSubcommand:
    """Says what vLLM's helper of tests asks of the words it starts a server with."""

    def subparser_init(self, subparsers):
        return self

    def parse_args(self, words):
        given = dict(itertools.pairwise(words))
        return types.SimpleNamespace(
            host=given.get("--host"), port=given.get("--port"), uds=given.get("--uds"),
            shutdown_timeout=0,
        )  # fmt: skip


class Asset:
    """A picture, film or sound that vLLM's conftest names and its tests of text do not look at."""

    def __init__(self, *args, **options):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return PHANTOMS.phantom(f"vllm.assets.{name}")


REPLIES = (
    *("EmbeddingResponse", "PoolingResponse", "ClassificationResponse", "ScoreResponse"),
    *("RerankResponse", "EmbeddingBytesResponse", "PoolingBytesResponse", "CompletionResponse"),
)


class Reply(types.SimpleNamespace):
    """The attributes of a JSON reply."""

    @classmethod
    def model_validate(cls, given):
        return _attributes(given)

    def model_dump(self, exclude=(), **options):
        return {name: plain(value) for name, value in vars(self).items() if name not in exclude}


def _attributes(value):
    if isinstance(value, dict):
        return Reply(**{key: _attributes(each) for key, each in value.items()})
    return [_attributes(each) for each in value] if isinstance(value, list) else value


def hub(*args, **options):
    import huggingface_hub

    return types.SimpleNamespace(
        snapshot_download=lambda repo_id=None, *a, **k: huggingface_hub.snapshot_download(repo_id),
        hf_hub_download=huggingface_hub.hf_hub_download,
    )


MARKS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<seed:think>",
    "</seed:think>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "[THINK]",
    "[/THINK]",
    "[TOOL_CALLS]",
    "<|tool_call|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_start|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜DSML｜",
    "<|python_start|>",
    "<|python_end|>",
    "<response>",
    "</response>",
    "<|im_end|>",
    "<tool_calls>",
    "</tool_calls>",
    "<function_call>",
    "<｜tool_calls_begin｜>",
    "<｜tool_call_begin｜>",
    "<｜tool_sep｜>",
    "<｜tool_call_end｜>",
    "<｜tool_calls_end｜>",
    "<steptml:toolcall>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<|call|>",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<longcat_tool_call>",
    "</longcat_tool_call>",
    "<｜end▁of▁sentence｜>",
    "<|action_start|>",
    "<|action_end|>",
    "<|plugin|>",
    "<|channel>",
    "<channel|>",
]
"""Tokens that parsers look for in a vocabulary."""


GENERATING = ("causal", "short", "thinking")
"""Stand-ins that stand for models of many tokenizers."""


def is_in_cache(name):
    """Whether the cache of the hub has a stand-in of that name with a tokenizer of its own."""
    cache = Path(os.environ["HF_HUB_CACHE"], f"models--{name.replace('/', '--')}", "snapshots")
    found = next(cache.glob("*/tokenizer.json"), None)
    return found is not None and found.resolve().parent.name not in GENERATING


def use_stand_in_tokenizers():
    """A tokenizer that is not on the disk becomes that of a stand-in that has MARKS."""
    original = AutoTokenizer.from_pretrained

    @functools.cache
    def stand_in():
        made = original(str(CHECKPOINTS / "causal"))
        made.add_tokens([mark for mark in MARKS if mark not in made.get_vocab()])
        return made

    @functools.cache
    def of_parsers():
        """Without a mark of its own before a text, as most tokenizers of these tests."""
        made = copy.deepcopy(stand_in())
        made.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B")
        return made

    def from_pretrained(name, *args, **options):
        is_here = not isinstance(name, str) or os.path.isdir(name) or is_in_cache(name)
        return original(name, *args, **options) if is_here else chosen()

    def chosen():
        return of_parsers() if "parser" in os.environ.get("PYTEST_CURRENT_TEST", "") else stand_in()

    AutoTokenizer.from_pretrained = staticmethod(from_pretrained)
    tokenizers = PHANTOMS.ensure("vllm.tokenizers")
    registry = PHANTOMS.ensure("vllm.tokenizers.registry")
    for module in (tokenizers, registry):
        module.get_tokenizer = lambda tokenizer_name=None, *args, **options: chosen()
