"""Sampling written out as loops, and makers of requests to sample for.

What is rounded per entry is rounded to fp32 as the definitions say; sums are float64.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from quire.ops import select
from quire.params import SamplingParams
from quire.runner.devices.device import CpuDevice
from quire.runner.sampling import Sampler
from quire.runner.sampling.sent_mask import sent_mask
from quire.step.grammar_mask import GrammarMask

INF = math.inf
WORD = 0xFFFFFFFF


@dataclass
class Request:
    """A request in the middle of its life."""

    params: SamplingParams
    prompt: list
    output: list
    seed: int = 0


class History:
    """The runner's ids of rows; what lies behind a request's end is poison."""

    def __init__(self, num_rows, length=64):
        self.token_ids = torch.full((num_rows, length), 2**31 - 1, dtype=torch.int32)

    def write(self, row, token_ids):
        self.token_ids[row] = 2**31 - 1
        self.token_ids[row, : len(token_ids)] = torch.tensor(token_ids, dtype=torch.int32)


class Bench:
    """A sampler with its history, driven by requests."""

    def __init__(
        self, vocab_size, num_rows=16, mode="raw_logprobs", processors=(), provider="torch"
    ):
        self.history = History(num_rows)
        self.sampler = Sampler(
            ops=select(device="cpu", dtype=torch.float32, providers=[provider]),
            num_rows=num_rows,
            vocab_size=vocab_size,
            device=CpuDevice(),
            history=self.history,
            max_logprobs=-1,
            logprobs_mode=mode,
            logits_processors=processors,
        )
        self.requests = {}

    def add(self, row, request):
        self.history.write(row, request.prompt + request.output)
        self.sampler.add(
            row,
            request.params,
            seed=request.seed,
            prompt_token_ids=request.prompt,
            output_token_ids=request.output,
        )
        self.requests[row] = request

    def remove(self, row):
        self.sampler.remove(row)
        self.history.write(row, [])
        return self.requests.pop(row)

    def sample(self, rows, logits, mask=None):
        known = [self.requests[row] for row in rows]
        positions = np.array([len(request.prompt + request.output) for request in known])
        logits = torch.as_tensor(np.array(logits))
        output = self.sampler.sample(logits, np.array(rows), positions, grammar_mask(mask))
        return output.to_host(output.tensors)

    def step(self, rows, logits, mask=None):
        """Sample and commit -> ids."""
        result = self.sample(rows, logits, mask)
        self.sampler.commit(result, self.sampler.members(np.array(rows)))
        for row, token_id in zip(rows, result.token_ids.tolist(), strict=True):
            request = self.requests[row]
            request.output = [*request.output, token_id]
            self.history.write(row, request.prompt + request.output)
        return result


def make_params(*, stops=(), bad_words=None, **fields):
    """Parameters as the input processor leaves them."""
    params = SamplingParams(**fields)
    params.update_from_generation_config({"eos_token_id": list(stops)})
    if bad_words:
        params.bad_words = [str(word) for word in bad_words]
        params._bad_words_token_ids = [list(word) for word in bad_words]
    return params


def grammar_mask(words):
    """The rows of a bitmask [R, W] that are not free, as the sampler takes them."""
    if words is None:
        return None
    places = [index for index, row in enumerate(words.tolist()) if set(row) != {-1}]
    return sent_mask(GrammarMask(places, np.asarray(words)[places]), torch.from_numpy)


def masked(logits, words):
    """logits with the tokens whose bit is 0 forbidden."""
    return np.array(
        [x if words[i // 32] >> (i % 32) & 1 else -INF for i, x in enumerate(logits)], np.float32
    )


def edited(logits, request):
    """The logits before temperature."""
    params, output = request.params, request.output
    x = [np.float32(value) for value in logits]
    if params.allowed_token_ids is not None:
        x = [v if i in params.allowed_token_ids else np.float32(-INF) for i, v in enumerate(x)]
    for i, bias in (params.logit_bias or {}).items():
        x[i] = x[i] + np.float32(bias)
    if len(output) < params.min_tokens:
        for i in params.all_stop_token_ids:
            x[i] = np.float32(-INF)
    for i in set(request.prompt) | set(output):
        r = np.float32(params.repetition_penalty)
        x[i] = x[i] / r if x[i] > 0 else x[i] * r
    for i in set(output):
        x[i] = x[i] - np.float32(params.frequency_penalty) * np.float32(output.count(i))
        x[i] = x[i] - np.float32(params.presence_penalty)
    for word in params.bad_words_token_ids or []:
        start = len(output) - (len(word) - 1)
        if start >= 0 and output[start:] == word[:-1]:
            x[word[-1]] = np.float32(-INF)
    return np.array(x, np.float32)


class Ambiguous(Exception):
    """Rounding may decide this case either way."""


def filtered(logits, params):
    """The logits after temperature, min-p, top-k and top-p: what is dropped is at -inf."""
    if params.temperature == 0:
        return logits
    x = logits / np.float32(params.temperature)
    ids = list(range(len(x)))
    if params.min_p > 0:
        limit = float(x.max()) + math.log(params.min_p)
        if any(0 < abs(float(v) - limit) < 1e-5 for v in x):
            raise Ambiguous
        ids = [i for i in ids if x[i] >= np.float32(limit)]
    if 0 < params.top_k < len(x):
        kth = sorted((x[i] for i in ids), reverse=True)[: params.top_k][-1]
        ids = [i for i in ids if x[i] >= kth]
    if params.top_p < 1:
        ids = nucleus(x.astype(np.float64), ids, params.top_p)
    kept = np.full_like(x, -INF)
    kept[ids] = x[ids]
    return kept


def nucleus(x, ids, top_p):
    ids = sorted(ids, key=lambda i: (-x[i], i))
    weights = [math.exp(x[i] - x[ids[0]]) for i in ids]
    before, kept = 0.0, []
    for i, weight in zip(ids, weights, strict=True):
        if kept and abs(before - top_p * sum(weights)) < 1e-5 * sum(weights):
            raise Ambiguous
        if kept and before >= top_p * sum(weights):
            break
        kept.append(i)
        before += weight
    return kept


def mix(x):
    """lowbias32 on plain integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D & WORD
    x ^= x >> 15
    x = x * 0x846CA68B & WORD
    return x ^ x >> 16


def noise(seed, position, token):
    """31 noise bits of a token."""
    low, high = seed & WORD, seed >> 32
    a = mix(mix(mix(position + 0x9E3779B9 & WORD) ^ low) ^ high)
    b = mix(mix(mix(position + 0x85EBCA6B & WORD) ^ high) ^ low) | 1
    y = (mix(token) ^ a) * 0x7FEB352D & WORD
    return ((y ^ y >> 15) * b & WORD) & 0x7FFFFFFF


def scores(kept, seed, position):
    """Gumbel scores: the largest is drawn."""
    found = np.full(len(kept), -INF)
    for i, value in enumerate(kept):
        if value > -INF:
            v = min((noise(seed, position, i) + 0.5) / 2**31, 1 - 2**-24)
            found[i] = float(value) - math.log(-math.log1p(-v))
    return found


def log_softmax(x):
    x = np.asarray(x, np.float64)
    with np.errstate(divide="ignore"):
        return x - x.max() - np.log(np.exp(x - x.max()).sum())
