"""The length that is served: the config's word, the user's wish."""

import pytest

from quire.errors import InvalidParameter
from quire.models.max_length import LengthFacts, choose_max_model_len, length_facts


def test_a_wish_within_the_limit_is_granted():
    facts = LengthFacts(131072, 4096, "max_position_embeddings")
    assert choose_max_model_len(facts, None) == (4096, "max_position_embeddings")
    assert choose_max_model_len(facts, 131072) == (131072, "given")


@pytest.mark.parametrize("wish", [0, -5, 101])
def test_a_wish_beyond_the_limit_is_refused(wish):
    with pytest.raises(InvalidParameter, match=f"max_model_len={wish} is not allowed: .*1 to 100"):
        choose_max_model_len(LengthFacts(100, 100, "n_positions"), wish)


def test_a_silent_config_leaves_it_to_the_user():
    facts = length_facts({})
    assert choose_max_model_len(facts, 7)[0] == 7
    assert choose_max_model_len(facts, None) == (
        2048,
        "no length key in config.json; set max_model_len",
    )
