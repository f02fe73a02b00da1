"""What guesses from tokens, against plain searches of the same texts."""

import asyncio
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.speculation import SpeculationPlan, SuffixRules
from quire.errors import EngineDeadError, InvalidParameter
from quire.runner.drafting.custom import make_proposer
from quire.runner.drafting.drafting import Drafting
from quire.runner.drafting.from_tokens import FirstOf, open_guessers
from quire.runner.drafting.guesser import GuessingDrafter
from quire.runner.drafting.ngram import NgramGuesser
from quire.runner.drafting.pace import FixedPace
from quire.runner.drafting.suffix import OutputCache, SuffixGuesser
from quire.runner.drafting.suffix_trie import GrowingText, SuffixTrie

FEW = st.lists(st.integers(0, 2), max_size=40)
"""Few different tokens: everything has occurred before, and overlaps itself."""


def searched(tokens, shortest, longest, most):
    """The tokens after the first place of the longest known end."""
    for size in range(longest, shortest - 1, -1):
        end = tokens[len(tokens) - size :]
        for place in range(size, len(tokens)):
            if size < len(tokens) and tokens[place - size : place] == end:
                return tokens[place : place + most]
    return []


@given(FEW, FEW, st.integers(1, 4), st.integers(0, 3), st.integers(1, 6))
def test_ngrams_are_those_of_a_search(first, second, shortest, more, most):
    guesser = NgramGuesser(first, shortest, shortest + more)
    for place, token in enumerate(second):
        guesser.extend([token])
        if place % 3:
            known = [*first, *second[: place + 1]]
            assert guesser.guess(most) == searched(known, shortest, shortest + more, most)


def counted(texts, stretch):
    """How often a stretch occurs in texts."""
    size = len(stretch)
    return sum(
        text[place : place + size] == stretch
        for text in texts
        for place in range(len(text) - size + 1)
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=25), st.integers(2, 6))
def test_the_trie_counts_what_occurs(tokens, depth):
    trie, text = SuffixTrie(depth), GrowingText()
    for token in tokens:
        trie.grow(text, token)
    for index, node in enumerate(text.ends):
        size = len(text.ends) - index
        assert node.count == counted([tokens], tokens[len(tokens) - size :])
        for token, child in (node.children or {}).items():
            assert child.count == counted([tokens], [*tokens[len(tokens) - size :], token])
    known = [n for n in range(1, depth) if counted([tokens], tokens[-n:]) > 1 and n <= len(tokens)]
    assert len(text.ends) == len(known)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=15), min_size=2, max_size=5))
def test_a_text_that_is_taken_out_leaves_nothing(texts):
    trie = SuffixTrie(5)
    grown = []
    for tokens in texts:
        text = GrowingText()
        for token in tokens:
            trie.grow(text, token)
        grown.append(text)
    for text in grown:
        trie.remove(text)
    assert trie.num_nodes == 0


def test_a_suffix_guess_goes_as_far_as_it_is_likely():
    rules = SuffixRules(min_probability=0.4)
    one = [1, 2, 3, 4, 5, 6, 9]
    guesser = SuffixGuesser([*one, 1, 2, 3], [], rules, None)
    assert guesser.guess(8) == [4, 5, 6], "as many as are matched"
    assert guesser.guess(2) == [4, 5]
    guesser.extend([4])
    assert guesser.guess(8) == [5, 6, 9, 1]
    guesser.extend([7])
    assert guesser.guess(8) == []
    split = SuffixGuesser([1, 2, 3, 1, 2, 4, 1, 2, 5, 8, 1, 2], [], rules, None)
    assert split.guess(8) == [], "each of three tokens is too unlikely"


def test_a_suffix_factor_has_no_largest():
    for factor in (1e308, float("inf")):
        guesser = SuffixGuesser([1, 2, 3, 4, 1, 2], [], SuffixRules(factor=factor), None)
        assert guesser.guess(3) == [3, 4, 1]


def test_outputs_of_others_are_known_while_and_after_they_run():
    rules = SuffixRules(depth=8, max_cached_requests=2)
    cache = OutputCache(8, 2)
    first = SuffixGuesser([], [5, 6, 7, 8, 9], rules, cache)
    assert first.guess(3) == []
    second = SuffixGuesser([1], [5, 6, 7], rules, cache)
    assert second.guess(8) == [8, 9]
    first.close()
    second.extend([8])
    assert second.guess(8) == [9]
    for _ in range(3):
        SuffixGuesser([], [1, 2], rules, cache).close()
    assert len(cache) == 2
    last = SuffixGuesser([], [6, 7], rules, cache)
    second.close()
    assert last.guess(4) == [8]
    for other in (last, *(SuffixGuesser([], [1], rules, cache) for _ in range(2))):
        other.close()
    assert SuffixGuesser([], [6, 7], rules, cache).guess(4) == []


def test_memory_of_the_cache_is_bounded():
    cache = OutputCache(8, 1000, max_nodes=300)
    rules = SuffixRules(depth=8)
    for start in range(60):
        SuffixGuesser([], [(start * 31 + i * 7) % 97 for i in range(40)], rules, cache).close()
        assert cache.trie.num_nodes <= 300 + 40 * 8


class Doubling:
    def __init__(self, plan):
        self.plan = plan

    def propose(self, token_ids, num_tokens):
        return [2 * token_ids[-1]] * num_tokens


def plan(method, **facts):
    return SpeculationPlan(method=method, num_tokens=4, max_drafts=8, **facts)


def test_a_class_of_the_users():
    path = f"{__name__}.Doubling"
    guesser = open_guessers(plan("custom_class", custom_class=path))([1, 2], [3])
    assert guesser.guess(3) == [6, 6, 6]
    guesser.extend([5])
    assert guesser.guess(1) == [10]
    for wrong in ("nothing.there.At", f"{__name__}.nothing", "collections.OrderedDict"):
        with pytest.raises(InvalidParameter, match="model"):
            make_proposer(plan("custom_class", custom_class=wrong))


def test_the_first_that_knows_something_guesses():
    known = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5]
    auto = open_guessers(plan("auto"))(known, [])
    assert isinstance(auto, FirstOf)
    assert auto.guess(4)[:1] == [6]
    auto.close()


class Endless:
    """Its guesses have no end."""

    def __init__(self, plan):
        pass

    def propose(self, token_ids, num_tokens):
        return count(token_ids[-1] + 1)


def test_guesses_without_end_are_cut():
    opened = open_guessers(plan("custom_class", custom_class=f"{__name__}.Endless"))
    assert opened([5], []).guess(3) == [6, 7, 8]


class Moody:
    """Raises for texts that begin with 9; else guesses the number of tokens that it knows."""

    def __init__(self, plan):
        pass

    def propose(self, token_ids, num_tokens):
        if token_ids[0] == 9:
            raise ValueError("not this one")
        return [len(token_ids)]


class Written:
    """Rows that keep their drafts."""

    def __init__(self):
        self.drafts = {}

    def write_drafts(self, row, drafts):
        self.drafts[row] = drafts


class Leaving:
    """Raises what its class says: what would end the process, or pass for a dead device."""

    raises = SystemExit(3)

    def __init__(self, plan): ...

    def propose(self, token_ids, num_tokens):
        raise self.raises


@pytest.mark.parametrize(
    "error",
    [SystemExit(3), GeneratorExit(), EngineDeadError("no"), asyncio.CancelledError()],
    ids=repr,
)
def test_what_would_end_the_process_costs_drafts_only(error, monkeypatch):
    monkeypatch.setattr(Leaving, "raises", error)
    opened = open_guessers(plan("custom_class", custom_class=f"{__name__}.Leaving"))
    drafting = Drafting(GuessingDrafter(opened, 100), FixedPace(2))
    drafting.add_row(SimpleNamespace(row=0, token_ids=[1], num_prompt_tokens=1))
    wanted = SimpleNamespace(sampled=[0], new_tokens=[[3]], limits=[1])
    assert drafting.propose(Written(), wanted) == [0]


def test_the_terminal_s_interrupt_goes_on_its_way(monkeypatch):
    monkeypatch.setattr(Leaving, "raises", KeyboardInterrupt())
    opened = open_guessers(plan("custom_class", custom_class=f"{__name__}.Leaving"))
    with pytest.raises(KeyboardInterrupt):
        opened([1], []).guess(1)


def test_a_guesser_that_raises_leaves_others_their_tokens():
    opened = open_guessers(plan("custom_class", custom_class=f"{__name__}.Moody"))
    drafter, rows = GuessingDrafter(opened, 100), Written()
    for row, first in enumerate((1, 9, 2)):
        drafter.add_row(SimpleNamespace(row=row, token_ids=[first], num_prompt_tokens=1))
    wanted = SimpleNamespace(sampled=[0, 1, 2], new_tokens=[[3], [4], [5, 6]], limits=[1, 1, 1])
    for _ in range(3):
        with pytest.raises(ValueError, match="not this one"):
            drafter.propose(rows, wanted)
    drafter.remove_row(1)
    assert drafter.propose(rows, wanted) == [1, 0, 1]
    assert rows.drafts == {0: [1 + 4], 2: [1 + 4 * 2]}
