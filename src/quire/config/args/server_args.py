"""`ServerArgs`: options of the HTTP server, next to `EngineArgs` in the flags of `quire serve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.config.args.command_line import CommandLineOptions
from quire.config.args.option import OptionGroup, check, options_of, unbuilt
from quire.errors import InvalidParameter

_LISTEN = OptionGroup("Listening")
_ACCESS = OptionGroup("Access")
_LIMITS = OptionGroup("Limits of one request")
_CHAT = OptionGroup("Chat")
_REPLY = OptionGroup("Replies")
_LOG = OptionGroup("Logging")
_KEPT_RESPONSES = 256
_NO_MIDDLEWARE = "Put a proxy in front; the server runs no code but its own."


@dataclass
class ServerArgs(CommandLineOptions):
    """The front end's own options, with the reference's names where it has them."""

    host: str | None = _LISTEN.text(None, "Address to listen on; None: 127.0.0.1 alone.")
    port: int = _LISTEN.integer(8000, "Port; 0: any that is free.", minimum=0, maximum=65535)
    uds: str | None = _LISTEN.text(None, "Path of a Unix socket to listen on instead of a port.")
    headless: bool = _LISTEN.flag(
        False, "Run this machine's data-parallel cores for a server elsewhere, and no server here."
    )
    api_server_count: int | None = _LISTEN.integer(
        None,
        "Processes that answer HTTP, all at the same address and before the same cores; None: 1.",
        minimum=1,
        maximum=64,
        flags=("-asc",),
    )
    data_parallel_supervisor_port: int = _LISTEN.integer(
        9256,
        "With --data-parallel-multi-port-external-lb: port where /health and /ready tell of all "
        "the servers.",
        minimum=1,
        maximum=65535,
    )
    root_path: str = _LISTEN.text(
        "", "Path below which a proxy serves this server; taken off a request's where it is there."
    )
    ssl_keyfile: str | None = _LISTEN.text(None, "TLS: file of the private key.")
    ssl_certfile: str | None = _LISTEN.text(None, "TLS: file of the certificate.")
    ssl_ca_certs: str | None = _LISTEN.text(
        None, "TLS: file of the authorities that clients' certificates are checked by."
    )
    ssl_cert_reqs: int = _LISTEN.integer(
        0,
        "TLS: whether clients need a certificate (0 no, 1 if they have one, 2 yes).",
        minimum=0,
        maximum=2,
    )
    ssl_keyfile_password: str | None = _LISTEN.text(None, "TLS: password of the private key.")
    ssl_ciphers: str | None = _LISTEN.text(
        None, "TLS: ciphers in OpenSSL's notation; None: Python's choice."
    )
    keep_alive_timeout_s: float = _LISTEN.number(
        5.0, "Time that an idle connection is kept.", unit="s", above=0
    )
    shutdown_timeout: float = _LISTEN.number(
        30.0,
        "Time that running requests have after SIGTERM; a second signal ends them at once.",
        unit="s",
        minimum=0,
    )
    api_key: str | list[str] | None = _ACCESS.names(
        None, "Keys of which a request must bring one (also in QUIRE_API_KEY)."
    )
    enable_admin: bool = _ACCESS.flag(
        False,
        "Serve the routes that control the engine (sleep, pause, resets, profiling). Needs a key.",
    )
    admin_port: int | None = _ACCESS.integer(
        None,
        "Serve those routes at this port of 127.0.0.1 instead of with the others; 0: any.",
        minimum=0,
        maximum=65535,
    )
    allowed_origins: str | list[str] | None = _ACCESS.names(
        None, "Origins of web pages that may use the server; none by default."
    )
    allowed_hosts: str | list[str] | None = _ACCESS.names(
        None,
        "Public names of a server at a loopback address without a key, such as a proxy's, *: any; "
        "web pages could reach it under other names.",
    )
    allow_credentials: bool = _ACCESS.flag(False, "Let those pages send cookies and the like.")
    allowed_methods: str | list[str] = _ACCESS.names("*", "Methods that those pages may use.")
    allowed_headers: str | list[str] = _ACCESS.names("*", "Headers that those pages may send.")
    max_header_bytes: int = _LIMITS.size(
        64 * 2**10, "Largest request line and headers that are read.", unit="bytes", minimum=1024
    )
    header_timeout_s: float = _LIMITS.number(
        20.0, "Time that a request line and headers may take to arrive.", unit="s", above=0
    )
    max_body_bytes: int = _LIMITS.size(
        32 * 2**20, "Largest body that is read.", unit="bytes", minimum=1024
    )
    body_timeout_s: float = _LIMITS.number(
        60.0, "Time that a body may take to arrive.", unit="s", above=0
    )
    strict_fields: bool = _LIMITS.flag(
        False, "Refuse every field of a body that is not declared, also those without an effect."
    )
    max_completions: int = _LIMITS.integer(
        128, "Most completions (prompts times n) of one request.", minimum=1
    )
    max_stop_strings: int = _LIMITS.integer(16, "Most stop strings of one request.", minimum=1)
    truncate_long_inputs: bool = _LIMITS.flag(
        False, "Cut texts that are longer than a model that pools takes, as other servers do."
    )
    max_stored_responses: int | None = _LIMITS.integer(
        None,
        "Most responses of /v1/responses that are kept to be asked for again; 0: none. None: 256, "
        "with several API servers none.",
        minimum=0,
    )
    max_stored_bytes: int = _LIMITS.size(
        64 * 2**20,
        "Most bytes of the responses that are kept, of the conversations, and of the message "
        "batches; the oldest make room.",
        unit="bytes",
        minimum=1024,
    )
    reader_timeout_s: float = _LIMITS.number(
        120.0,
        "Time that a client may leave a stream unread before it is cut off.",
        unit="s",
        above=0,
    )
    chat_template_content_format: str = _CHAT.text(
        "auto",
        "Form in which the chat template gets contents; auto reads it from the template.",
        choices=("auto", "string", "openai"),
    )
    trust_request_chat_template: bool = _CHAT.flag(
        False, "Let a request bring its own chat template."
    )
    trust_request_mm_kwargs: bool = _CHAT.flag(
        False,
        "Let a chat request bring mm_processor_kwargs and media_io_kwargs, which change how much "
        "memory its pictures take.",
    )
    default_chat_template_kwargs: dict[str, Any] | None = _CHAT.mapping(
        None, "Template variables that requests need not give."
    )
    response_role: str = _CHAT.text("assistant", "Role of the answering side.")
    tool_call_parser: str = _CHAT.text(
        "auto",
        "Format of tool calls in outputs: auto looks at the chat template and takes "
        "generic where that shows no tools; none reads no calls.",
    )
    enable_auto_tool_choice: bool = unbuilt(
        True, "let the model choose to call", "It always may.", False
    )
    reasoning_parser: str = _CHAT.text(
        "auto",
        "Format of reasoning in outputs: auto looks at the chat template, none does not tell "
        "it from the answer.",
    )
    exclude_tools_when_tool_choice_none: bool = _CHAT.flag(
        False, "Do not tell the model of tools that it may not call."
    )
    fingerprint_mode: str = _REPLY.text(
        "full",
        "Content of system_fingerprint: version and a hash of the plan, the hash, your own text.",
        choices=("full", "hash", "custom", "none"),
    )
    fingerprint_value: str | None = _REPLY.text(None, "The text of fingerprint_mode custom.")
    return_tokens_as_token_ids: bool = _REPLY.flag(
        False, "Show tokens in log-probabilities as token_id:N."
    )
    enable_force_include_usage: bool = _REPLY.flag(
        False, "Send the usage with every chunk of every stream, asked for or not."
    )
    enable_prompt_tokens_details: bool = _REPLY.flag(
        True, "Tell in usage how many prompt tokens came from the prefix cache."
    )
    enable_tokenizer_info_endpoint: bool = _REPLY.flag(
        False, "Serve /tokenizer_info: the chat template and the special tokens."
    )
    enable_scale_out: bool = _REPLY.flag(
        False, "Serve /inference/v1/generate, which takes and gives token ids."
    )
    enable_request_id_headers: bool = _REPLY.flag(True, "Answer with the header X-Request-Id.")
    sse_keep_alive_interval: float = _REPLY.number(
        15.0,
        "Seconds of silence after which a stream carries an empty line; 0: never.",
        unit="s",
        minimum=0,
    )

    uvicorn_log_level: str = _LOG.text(
        "info", "What is logged.", choices=("debug", "info", "warning", "error", "critical")
    )
    enable_access_log: bool = _LOG.flag(False, "Log a line for each request.")
    enable_log_requests: bool = _LOG.flag(
        False, "Log the id of each request that reaches the engine."
    )
    disable_uvicorn_access_log: bool = unbuilt(True, "log no requests", "Use --enable-access-log.")
    enable_server_load_tracking: bool = unbuilt(
        True, "count requests for /load", "They are always counted.", False
    )
    metrics_prefix: str = _LOG.text(
        "vllm:",
        "Prefix of the names at /metrics; dashboards of this field look for vllm:.",
        choices=("vllm:", "quire:"),
    )
    middleware: list[str] = unbuilt([], "further middleware", _NO_MIDDLEWARE)
    lora_modules: str | list[str] | None = _ACCESS.names(
        None,
        "Adapters that requests name as their model: NAME=FOLDER, or JSON with name, path and "
        "base_model_name. They are loaded before the server starts; needs --enable-lora.",
    )
    tool_server: str | None = unbuilt(
        None, "servers of tools", "Tools are the caller's to run; leave it out."
    )
    tokens_only: bool = unbuilt(
        False, "serve token ids alone", "Send token ids to /v1/completions."
    )
    grpc: bool = unbuilt(False, "serve gRPC", "Use HTTP.")

    def validate(self) -> None:
        """Raise InvalidParameter or InvalidType for a value that an option may not have."""
        for name, facts in options_of(type(self)).items():
            check(name, getattr(self, name), facts)
        if self.num_api_servers > 1 and self.max_stored_responses:
            allowed = "responses are kept in one process, and several answer"
            hint = "Leave out --api-server-count, or keep none (0)."
            raise InvalidParameter("max_stored_responses", self.max_stored_responses, allowed, hint)
        check_keys("--api-key", listed(self.api_key))

    @property
    def num_api_servers(self) -> int:
        return self.api_server_count or 1

    @property
    def num_stored_responses(self) -> int:
        if self.max_stored_responses is None:
            return _KEPT_RESPONSES if self.num_api_servers == 1 else 0
        return self.max_stored_responses

    @property
    def origins(self) -> list[str]:
        """The web origins that may use the server."""
        return listed(self.allowed_origins)

    @property
    def hosts(self) -> list[str]:
        """The public names of the server."""
        return listed(self.allowed_hosts)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(listed(self.api_key))


def check_keys(origin: str, keys: Sequence[str]) -> None:
    """Raise InvalidParameter for a key that no client can send: with an empty one, which a variable
    without a value leaves, the server would be open to everybody.
    """
    for key in keys:
        if not key.strip():
            raise InvalidParameter(
                origin, key, "an API key is empty", "Give a key, or leave it out."
            )
        if key != key.strip() or not key.isprintable():
            text = "an API key has spaces, line ends or control characters that no client can send"
            raise InvalidParameter(origin, "***", text)


def listed(names: str | list[str] | None) -> list[str]:
    """The names that an option of one or several has."""
    return [names] if isinstance(names, str) else list(names or [])
