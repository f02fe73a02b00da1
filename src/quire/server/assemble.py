"""Builds the parts of a server from the values of an engine's plan and the server's options."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.config.args.server_args import ServerArgs, listed
from quire.config.plan import EnginePlan
from quire.config.pooler_config import PoolerConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.frontend.input_processor import ReasoningMarks
from quire.engine.shared_cores.load_board import Neighbours
from quire.environment import read_environment
from quire.errors import InvalidParameter
from quire.io_processor import make_io_processor
from quire.lora.resolver import LORA_RESOLVERS, FolderResolver, LoRAResolver
from quire.release import __version__
from quire.server.adapters import ServedAdapters, parse_modules
from quire.server.app import Access
from quire.server.context import AbortElsewhere, Server
from quire.server.http.browser_guard import is_loopback
from quire.server.http.in_flight import InFlightRequests
from quire.server.http.json_body import FieldRules
from quire.server.http.listening import Listening, Tls
from quire.server.long_texts import LongTexts
from quire.server.openai.requests import EXTRA_ARGS, Limits
from quire.server.output_parsing import FormsAfterReasoning, ParserPlan, choose_parsers
from quire.server.owned_store import OwnedStore
from quire.server.settings import ChatSettings, PoolingSettings, ReplySettings
from quire.text.tokenizer import Tokenizer

_NO_VOCABULARY = 2**18
_DECISIVE = ("model", "architecture", "dtype", "quantization", "kv_dtype", "max_model_len")
"""The fields of a plan that answers depend on."""


@dataclass(frozen=True, slots=True)
class Siblings:
    """The other API servers of the same engine at the same address, if there are any.

    `on_started` is called when connections are accepted, in place of the log line.
    """

    neighbours: Neighbours | None = None
    abort_elsewhere: AbortElsewhere | None = None
    on_started: Callable[[Server], None] | None = None


def build_server(
    engine: AsyncLLM,
    tokenizer: Tokenizer | None,
    plan: EnginePlan,
    args: ServerArgs,
    keys: Sequence[str],
    siblings: Siblings | None = None,
) -> Server:
    """Builds the context of every handler. `keys` are the API keys that are accepted."""
    siblings = siblings or Siblings()
    inputs, model = engine.front_end.inputs, engine.model_config.model
    max_len = inputs.limits.max_len
    kept = (args.num_stored_responses, args.max_stored_bytes)
    parser_plan = _parser_plan(tokenizer, engine.front_end.chat_template, args)
    if not plan.sampling.reasoning_marks:
        inputs.generation.reasoning_marks = _reasoning_marks(parser_plan)
    if name := plan.sampling.structured_outputs.reasoning_parser:
        inputs.generation.form_places = FormsAfterReasoning(name)
    return Server(
        engine=engine,
        tokenizer=tokenizer,
        names=plan.model.served_model_names,
        root=model,
        limits=Limits(
            max_model_len=max_len,
            body_bytes=args.max_body_bytes,
            body_timeout_s=args.body_timeout_s,
            completions=args.max_completions,
            stop_strings=args.max_stop_strings,
            token_ids=_NO_VOCABULARY if tokenizer is None else tokenizer.vocab_size,
            reader_timeout_s=args.reader_timeout_s,
            extra_args=None if inputs.generation.custom else EXTRA_ARGS,
        ),
        sampling_defaults=plan.sampling.sampling_defaults,
        chat=ChatSettings(
            template=engine.front_end.chat_template,
            content_format=args.chat_template_content_format,
            trusts_requests=args.trust_request_chat_template,
            trusts_media_options=args.trust_request_mm_kwargs,
            default_kwargs=args.default_chat_template_kwargs or {},
            response_role=args.response_role,
            hides_tools=args.exclude_tools_when_tool_choice_none,
            parser_plan=parser_plan,
        ),
        pooling=_pooling_settings(plan, max_len, cuts=args.truncate_long_inputs),
        replies=ReplySettings(
            tokens_as_ids=args.return_tokens_as_token_ids,
            forces_usage=args.enable_force_include_usage,
            prompt_details=args.enable_prompt_tokens_details,
            keep_alive_s=args.sse_keep_alive_interval,
            fingerprint=_fingerprint(plan, args),
        ),
        field_rules=FieldRules(is_strict=args.strict_fields),
        num_keys=len(keys),
        metrics_prefix=args.metrics_prefix,
        responses=OwnedStore(*kept),
        batches=OwnedStore(*kept),
        conversations=OwnedStore(*kept),
        in_flight=InFlightRequests(siblings.neighbours),
        abort_elsewhere=siblings.abort_elsewhere,
        texts=None if tokenizer is None else LongTexts(tokenizer, max_len),
        adapters=_served_adapters(engine, plan),
        io_processor=make_io_processor(plan),
    )


def _served_adapters(engine: AsyncLLM, plan: EnginePlan) -> ServedAdapters:
    environment = read_environment()
    # the last one is what resolvers are asked about
    models = (*plan.model.served_model_names, engine.model_config.model)
    resolvers: dict[str, LoRAResolver] = {}
    if environment.adapter_folder is not None:
        title = f"folder {environment.adapter_folder}"
        resolvers[title] = FolderResolver(environment.adapter_folder, models)
    return ServedAdapters(
        load=None if plan.adapters is None else engine.add_lora,
        may_change=environment.may_load_adapters,
        resolvers={**resolvers, **LORA_RESOLVERS},
        models=models,
    )


async def load_modules(adapters: ServedAdapters, args: ServerArgs) -> None:
    """Load the adapters of --lora-modules. Raises RequestError for one that cannot be used."""
    for asked in parse_modules(listed(args.lora_modules)):
        # a request with this name would always get the model
        if asked.lora_name in adapters.models:
            allowed = "the model has this name itself"
            raise InvalidParameter("lora_modules", asked.lora_name, allowed)
        await adapters.add(asked)


def _pooling_settings(plan: EnginePlan, max_len: int, *, cuts: bool) -> PoolingSettings:
    config = plan.model.pooler_config or PoolerConfig()
    longest = config.max_embed_len
    if not config.enable_chunked_processing:
        longest = min(longest or max_len, max_len)
    return PoolingSettings(
        prompts=plan.model.prompts,
        window=plan.steps.crowd,
        longest=longest,
        has_pieces=config.enable_chunked_processing,
        cuts=cuts and not config.enable_chunked_processing,
    )


def _parser_plan(tokenizer: Tokenizer | None, given: str | None, args: ServerArgs) -> ParserPlan:
    """Parsing of outputs; `given`: the template in place of the tokenizer's. Raises
    InvalidParameter for a format that does not exist.
    """
    template = None
    if tokenizer is not None and (given or tokenizer.chat_template):
        template = tokenizer.get_chat_template(given, tools=())
    return choose_parsers(args.tool_call_parser, args.reasoning_parser, template)


def _reasoning_marks(parser_plan: ParserPlan) -> ReasoningMarks | None:
    """The delimiters of the reasoning, where it has a fixed pair; its length is bounded by them."""
    found = parser_plan.reasoning
    if found is None or found.table is not None:
        return None
    return ReasoningMarks(found.starts[0], found.ends[0], found.is_assumed)


def access_of(args: ServerArgs, keys: Sequence[str]) -> Access:
    """Access to the server, from its arguments."""
    # keys keep foreign pages away by themselves; so do a certificate, which lacks the page's name,
    # and a socket file, which browsers do not open
    is_open_to_pages = (
        not keys and not args.ssl_certfile and not args.uds and is_loopback(args.host)
    )
    return Access(
        keys=keys,
        origins=args.origins,
        hosts=args.hosts if is_open_to_pages else None,
        methods=listed(args.allowed_methods),
        headers=listed(args.allowed_headers),
        allow_credentials=args.allow_credentials,
        root_path=args.root_path,
        shows_request_ids=args.enable_request_id_headers,
        logs=args.enable_access_log,
    )


def listening_of(args: ServerArgs) -> Listening:
    """Acceptance and bounds of connections, from the server's arguments."""
    tls = Tls(
        certfile=args.ssl_certfile,
        keyfile=args.ssl_keyfile,
        keyfile_password=args.ssl_keyfile_password,
        ca_certs=args.ssl_ca_certs,
        cert_reqs=args.ssl_cert_reqs,
        ciphers=args.ssl_ciphers,
    )
    return Listening(
        tls=tls,
        keep_alive_s=args.keep_alive_timeout_s,
        max_header_bytes=args.max_header_bytes,
        header_timeout_s=args.header_timeout_s,
    )


def _fingerprint(plan: EnginePlan, args: ServerArgs) -> str | None:
    """The `system_fingerprint`: two servers with equal ones give equal answers to a seed."""
    if args.fingerprint_mode == "none":
        return None
    if args.fingerprint_mode == "custom":
        return args.fingerprint_value
    decided = repr([(name, value) for name, value in plan.decided() if name in _DECISIVE])
    digest = hashlib.sha256(decided.encode()).hexdigest()[:8]
    return digest if args.fingerprint_mode == "hash" else f"quire-{__version__}-{digest}"
