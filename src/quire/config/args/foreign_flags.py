"""Flags of `vllm serve` that are not options here, each with what to do instead.

Command lines move between servers; such a flag is refused by its name, not as an unknown one. Those
that are accepted at the value that changes nothing are in unbuilt_args.py.
"""

from __future__ import annotations

from collections.abc import Iterator

_INSTEAD: dict[str, str] = {
    "Model code and configuration are Quire's own; use --hf-overrides to change config.json.": """
        model-class-overrides""",
    "Give the folder with the weights as MODEL.": "model-weights",
    "Leave it out: noise is drawn so that a seed gives the same tokens.": "use-fp64-gumbel",
    "Leave it out; /start_profile with --profiler-config traces steps.": """
        enable-layerwise-nvtx-tracing enable-logging-iteration-details
        jit-monitor-mode jit-monitor-verbose enable-mm-processor-stats""",
    "Leave it out: sleep and wake_up need no preparation.": """
        sleep-mode-offload-cudagraph sleep-preserve-parameter-names enable-cumem-allocator
        enable-nccl-comm-suspend""",
    "Use --quantization int8, int4 or fp8.": "allow-deprecated-quantization",
    "Leave it out: the attention provider is chosen by what it supports.": """
        kernel-config moe-backend linear-backend mamba-config mamba-backend
        enable-flash-late-interaction sparse-indexer-topk-backend gdn-prefill-backend
        kda-prefill-backend kda-decode-backend ir-op-priority enable-flashinfer-autotune
        mamba-ssu-algorithm""",
    "Leave it out: weights are read from safetensors files.": """
        safetensors-prefetch-num-threads safetensors-prefetch-block-size ignore-patterns
        pt-load-map-location""",
    "Leave it out: all blocks of a prefix are cached until their memory is needed.": """
        prefix-cache-retention-interval prefix-match-unit swa-bounded-replay""",
    "--kv-cache-dtype holds for all layers.": "kv-cache-dtype-skip-layers",
    "Leave it out: states of recurrent layers are float32, and snapshots are automatic.": """
        mamba-block-size mamba-cache-dtype mamba-ssm-cache-dtype mamba-cache-mode
        enable-mamba-cache-stochastic-rounding mamba-cache-philox-rounds
        enable-mamba-shared-prefix-checkpoint use-replayssm replayssm-buffer-len""",
    "Use --offload-params, which goes with --cpu-offload-gb, too.": "cpu-offload-params",
    "Leave it out: offloaded weights are copied ahead of their layer.": "offload-backend",
    "Use --max-num-batched-tokens.": "max-num-scheduled-tokens",
    "Use --max-num-seqs.": "max-num-active-seqs",
    "Use --long-prefill-token-threshold.": "long-prefill-token-threshold-adaptive",
    "Leave it out: there is one scheduler; see --scheduling-policy.": """
        scheduler-reserve-full-isl watermark prefill-schedule-interval""",
    "Leave it out: the processes of --data-parallel-multi-port-external-lb are not probed.": """
        dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s
        dp-supervisor-probe-failure-threshold""",
    "Leave it out: it tunes ranks of other engines (docs/ranks.md).": """
        dcp pcp dcp-comm-backend dcp-q-replicate cp-kv-cache-interleave-size
        dcp-kv-cache-interleave-size
        distributed-timeout-seconds
        cpu-distributed-timeout-seconds ray-workers-use-nsight enable-batch-sharded-sampling
        enable-hc-sp enable-shm-tensor-arena""",
    "Leave it out: --enable-expert-parallel spreads experts evenly.": """
        eplb-config expert-placement-strategy all2all-backend enable-ep-weight-filter
        dp-sync-interval disable-nccl-for-dp-synchronization""",
    "Leave it out: steps are not split into overlapping micro-batches (docs/ranks.md).": """
        enable-dbo ubatch-size dbo-decode-token-threshold dbo-prefill-token-threshold""",
    "POST /scale_elastic_ep of --enable-admin changes the number of copies at any time.": """
        enable-elastic-ep elastic-ep-max-dp-size""",
    "Choose devices with CUDA_VISIBLE_DEVICES.": "device-ids",
    "Leave it out: dead cores are restarted; see --max-core-restarts.": """
        enable-fault-tolerance fault-tolerance-config""",
    "Merge the adapter into the checkpoint before loading it.": """
        lora-extra-vocab-size long-lora-scaling-factors
        enable-prompt-adapter max-prompt-adapters max-prompt-adapter-token""",
    "Leave it out: docs/pictures.md has the options of pictures.": """
        mm-processor-cache-type mm-hasher-algorithm mm-encoder-only mm-encoder-attn-backend
        mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-path
        mm-encoder-fp8-scale-save-margin video-pruning-rate video-pruning-method mm-tensor-ipc
        mm-processor-device mm-ipc-gpu-memory-gb mm-device-do-normalize
        mm-shm-cache-max-object-size-mb disable-mm-preprocessor-cache ec-manager-config""",
    "Such models are not built; leave it out.": "diffusion-config dc engram-config",
    "Use --max-num-seqs and --max-num-batched-tokens, where speed and delay are traded.": """
        performance-mode""",
    "Use --tool-call-parser or --reasoning-parser with a name that `--help` lists.": """
        tool-parser-plugin reasoning-parser-plugin""",
    "Leave it out: a tool's `strict` decides.": "tool-strict-level",
    "Leave it out: /metrics has what is measured.": """
        show-hidden-metrics-for-version kv-cache-metrics kv-cache-metrics-sample
        cudagraph-metrics enable-mfu-metrics enable-per-request-metrics""",
    "Use --otlp-traces-endpoint alone: spans have the times of each part.": """
        collect-detailed-traces""",
    "Use --uvicorn-log-level; in Python, set the level of the logger quire.": "log-level",
    "Use --uvicorn-log-level and --enable-access-log.": """
        logging-config log-config-file disable-access-log-for-endpoints log-error-stack""",
    "Prompts and outputs are never logged; --enable-log-requests logs ids.": """
        max-log-len enable-log-outputs enable-log-deltas disable-log-requests""",
    "Leave it out: it belongs to other platforms.": "aux-output-config",
    "Watermarks are not built; leave it out.": "watermark-config",
    "Use /v1/chat/completions; Cohere's own route for chats is not served.": """
        cohere-format cohere-is-reasoning-model""",
    "Use HTTP.": "grpc-port",
    "Restart the server when the certificate changes.": "enable-ssl-refresh",
    "Leave it out: /docs and /openapi.json need nothing from outside.": """
        disable-fastapi-docs enable-offline-docs""",
    "Use --max-header-bytes and --header-timeout-s.": """
        h11-max-incomplete-event-size h11-max-header-count""",
    "Use `chat_template_kwargs` of a request or --default-chat-template-kwargs.": """
        anthropic-disabled-thinking-effort""",
    # names of earlier releases
    "There is no swap: a request without room is computed again.": """
        swap-space preemption-mode""",
    "Use --structured-outputs-config.": """
        guided-decoding-backend guided-decoding-disable-fallback
        guided-decoding-disable-any-whitespace""",
    "Leave it out: --reasoning-parser is enough.": "enable-reasoning",
    "Leave it out: there is one engine and one scheduler.": """
        use-v2-block-manager num-scheduler-steps multi-step-stream-outputs num-lookahead-slots
        disable-async-output-proc disable-frontend-multiprocessing tokenizer-pool-size
        tokenizer-pool-type tokenizer-pool-extra-config cuda-graph-sizes max-seq-len-to-capture""",
    "Use --hf-overrides.": "rope-scaling rope-theta",
    "Use --runner generate or --runner pooling, and --convert embed or classify.": "task",
    "Use --pooler-config.": "override-pooler-config",
    "Use --speculative-config.": """
        speculative-model num-speculative-tokens ngram-prompt-lookup-max ngram-prompt-lookup-min""",
    "Leave it out: ranks are processes of one machine.": "worker-use-ray engine-use-ray",
    "Adapters may have what docs/lora.md lists; leave it out.": "enable-lora-bias",
}
"""Advice -> the flags that it goes for, without dashes."""


def _by_name() -> Iterator[tuple[str, str]]:
    for instead, names in _INSTEAD.items():
        for name in names.split():
            yield name, instead


FOREIGN_FLAGS: dict[str, str] = dict(_by_name())
"""Flag without dashes -> what to do instead."""
