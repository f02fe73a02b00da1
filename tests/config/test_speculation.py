"""`speculative_config` and its short forms: what they decide, and what they refuse."""

import re

import msgspec
import pytest

from quire.config.args.engine_args import EngineArgs
from quire.config.draft_facts import DraftFacts, DraftWish
from quire.config.resolve.resolve import resolve
from quire.config.speculation import NgramRules
from quire.config.speculative_config import speculative_config
from quire.errors import InvalidParameter, InvalidType, NotBuiltYet, UnknownParameter
from tests.config import plans

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def planned(config, draft=None, **args):
    given = EngineArgs(speculative_config=config, **args)
    wish = DraftWish(speculative_config(given), draft)
    model = msgspec.structs.replace(plans.make_model(), drafts=wish)
    return resolve(given, model, plans.make_machine())


def test_without_a_wish_nothing_is_drafted():
    assert speculative_config(EngineArgs()) is None
    assert speculative_config(EngineArgs(speculative_config={})) is None
    assert resolve(EngineArgs(), plans.make_model(), plans.make_machine()).speculation is None


@pytest.mark.parametrize(
    "args",
    [
        {"speculative_config": NGRAM},
        {"speculative_config": {"model": "ngram", "num-speculative-tokens": 3}},
        {"speculative_config": {"method": "ngram_gpu"}, "spec_tokens": 3},
        {"speculative_config": {"model": "[ngram]"}, "spec_tokens": 3},
        {"speculative_config": {"method": "[ngram]"}, "spec_tokens": 3},
        {"spec_method": "ngram", "spec_tokens": 3},
        {"spec_model": "ngram", "spec_tokens": 3},
    ],
    ids=str,
)
def test_ways_to_say_the_same(args):
    config = speculative_config(EngineArgs(**args))
    assert (config.method, config.num_speculative_tokens) == ("ngram", 3)


@pytest.mark.parametrize(
    ("given", "rules"),
    [
        ({}, NgramRules(5, 5)),
        ({"prompt_lookup_max": 4}, NgramRules(4, 4)),
        ({"prompt_lookup_max": 32}, NgramRules(32, 32)),
        ({"prompt_lookup_min": 2}, NgramRules(2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, NgramRules(2, 4)),
    ],
    ids=str,
)
def test_an_ngram_window_of_one_bound_has_one_size(given, rules):
    assert planned(NGRAM | given).speculation.ngram == rules


def test_the_number_of_drafts():
    assert planned(NGRAM).speculation.num_tokens == 3
    assert planned({"method": "suffix"}).speculation.num_tokens == 24
    assert any("up to 24" in note for note in planned({"method": "suffix"}).notes)
    assert planned({"method": "auto"}).speculation.num_tokens == 8
    plan = planned(NGRAM, max_num_seqs=100).speculation
    assert plan.max_drafts == 3 * 32
    assert planned(NGRAM, max_num_seqs=5).speculation.max_drafts == 15


def draft(method, **facts):
    facts = {"hf_config": {}, "num_predicted": None} | facts
    return DraftFacts(method=method, name="d", folder="/d", weights_format="safetensors", **facts)


def test_a_draft_that_says_how_many_it_was_trained_for():
    mtp = draft("mtp", num_predicted=2, is_target=True)
    plan = planned({"method": "mtp"}, mtp).speculation
    assert plan.num_tokens == 2 and plan.draft.is_target
    assert planned({"method": "mtp", "num_speculative_tokens": 4}, mtp).speculation.num_tokens == 4
    with pytest.raises(InvalidParameter, match="a multiple of 2"):
        planned({"method": "mtp", "num_speculative_tokens": 3}, mtp)


def test_a_draft_is_no_longer_than_it_can_be():
    config = {"method": "draft_model", "model": "d", "num_speculative_tokens": 3}
    short = draft("draft_model", hf_config={"max_position_embeddings": 512})
    assert planned(config, short).speculation.draft.max_model_len == 512
    with pytest.raises(InvalidParameter, match="at most the draft's, 512"):
        planned(config | {"max_model_len": 600}, short)
    with pytest.raises(InvalidParameter, match="at most the target's, 100"):
        planned(config | {"max_model_len": 200}, draft("eagle"), max_model_len=100)


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"method": "ngram"}, InvalidParameter, "num_speculative_tokens"),
        ({"num_speculative_tokens": 3}, InvalidParameter, "'method'"),
        ({"method": "best"}, InvalidParameter, "one of ngram, suffix"),
        ({"method": "eagle", "num_speculative_tokens": 3}, InvalidParameter, "'model'"),
        ({"method": "custom_class", "num_speculative_tokens": 3}, InvalidParameter, "'model'"),
        ({"method": "dflash", "model": "d"}, NotBuiltYet, "use eagle3"),
        ({"method": "dspark"}, NotBuiltYet, "use eagle3"),
        (NGRAM | {"rejection_sample_method": "block"}, NotBuiltYet, "to the bit"),
        (NGRAM | {"rejection_sample_method": "synthetic"}, NotBuiltYet, "to the bit"),
        (NGRAM | {"synthetic_acceptance_rates": [0.5]}, NotBuiltYet, "to the bit"),
        (NGRAM | {"parallel_drafting": True}, NotBuiltYet, "one pass"),
        (NGRAM | {"use_heterogeneous_vocab": True}, NotBuiltYet, "tokenizer"),
        (NGRAM | {"draft_tensor_parallel_size": 2}, NotBuiltYet, "one device"),
        (NGRAM | {"tensor_parallel_size": 1}, UnknownParameter, "draft_tensor_parallel_size"),
        (NGRAM | {"lookahead": 1}, UnknownParameter, "lookahead"),
        (NGRAM | {"num_speculative_tokens": 0}, InvalidParameter, "at least 1"),
        (NGRAM | {"num_speculative_tokens": 999}, InvalidParameter, "at most 128"),
        (NGRAM | {"num_speculative_tokens": "3"}, InvalidType, "int"),
        (NGRAM | {"num_speculative_tokens": True}, InvalidType, "int"),
        (NGRAM | {"prompt_lookup_min": 4, "prompt_lookup_max": 3}, InvalidParameter, "at most"),
        (NGRAM | {"prompt_lookup_max": 33}, InvalidParameter, "at most 32"),
        (NGRAM | {"prompt_lookup_max": 2**70}, InvalidParameter, "at most 32"),
        (NGRAM | {"prompt_lookup_min": 10**6}, InvalidParameter, "at most 32"),
        (
            {"method": "suffix", "suffix_decoding_max_tree_depth": 129},
            InvalidParameter,
            "at least 1 and at most 128",
        ),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, InvalidParameter, "at least 1"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, InvalidParameter, "at most 1"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": -1}, InvalidParameter, "least 0"),
        (NGRAM | {"draft_sample_method": "best"}, InvalidParameter, "greedy or probabilistic"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(config, error, text):
    with pytest.raises(error, match=re.escape(text)):
        planned(config)


@pytest.mark.parametrize(
    "ranges",
    [[], [(2, 4, 1)], [(1, 4, 3), (4, 8, 1)], [(1, 4, -1)], [(1, 0, 2)], [(5, 9, 1), (1, 4, 3)]],
    ids=str,
)
def test_ranges_of_batches_ascend_from_one(ranges):
    key = "num_speculative_tokens_per_batch_size"
    with pytest.raises(InvalidParameter, match=key):
        planned(NGRAM | {key: ranges})
    good = planned(NGRAM | {key: [[1, 4, 3], [9, 16, 0]]}).speculation
    assert good.by_batch == ((1, 4, 3), (9, 16, 0)) and not good.is_adaptive


@pytest.mark.parametrize("name", ["method", "num_speculative_tokens"])
def test_a_short_form_and_its_key_exclude_each_other(name):
    short = {"method": {"spec_method": "ngram"}, "num_speculative_tokens": {"spec_tokens": 2}}
    with pytest.raises(InvalidParameter, match="Give one of the two"):
        planned(NGRAM, **short[name])


def test_a_path_of_a_class_is_a_method():
    config = {"model": "my_package.drafts.Mine", "num_speculative_tokens": 2}
    plan = planned(config).speculation
    assert (plan.method, plan.custom_class) == ("custom_class", "my_package.drafts.Mine")


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        ("ngram", "max_model_len", 64),
        ("ngram", "suffix_decoding_min_token_prob", 0.3),
        ("suffix", "prompt_lookup_max", 4),
        ("auto", "draft_sample_method", "greedy"),
        ("auto", "quantization", "int8"),
        ("ngram", "revision", "main"),
        ("eagle", "prompt_lookup_min", 2),
        ("medusa", "quantization", "int8"),
    ],
)
def test_keys_of_other_methods_are_refused(method, key, value):
    given = {"method": method, "num_speculative_tokens": 3, key: value}
    if method in ("eagle", "medusa"):
        given["model"] = "some/folder"
    with pytest.raises(InvalidParameter, match=f"it goes with .*the method is {method}") as caught:
        speculative_config(EngineArgs(speculative_config=given))
    assert caught.value.parameter == f"speculative_config[{key!r}]"


def test_a_draft_is_rounded_in_known_ways_only():
    def rounding(given, **config):
        wish = {"method": "draft_model", "model": "d", "num_speculative_tokens": 3}
        facts = draft("draft_model", hf_config=config)
        plan = planned(wish | {"quantization": given}, facts)
        return plan.speculation.draft.quantization

    assert rounding(None) is None and rounding("int8") == "int8"
    with pytest.raises(InvalidParameter, match=r"speculative_config\['quantization'\]='int9'"):
        rounding("int9")
    with pytest.raises(InvalidParameter, match="8-bit floats are for GPUs"):
        rounding("fp8")
    stored = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    stored["version"] = "gemm"
    assert rounding(None, quantization_config=stored) is None
    assert rounding("awq_marlin", quantization_config=stored) is None
    with pytest.raises(InvalidParameter, match="as the draft is stored"):
        rounding("int8", quantization_config=stored)
