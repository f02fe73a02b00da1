"""Stop strings against a search of the whole text, for any way of cutting it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.frontend.stop_strings import StopStringFinder


def first_match(text, stops, boundary=0):
    """(stop, start, end) of the match that ends first behind `boundary`; the first listed of
    several.
    """
    for end in range(boundary + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return stop, end - len(stop), end
    return None


def find(pieces, stops, num_skipped=0):
    finder = StopStringFinder(stops)
    for place, piece in enumerate(pieces):
        if place < num_skipped:
            finder.skip(piece)
        elif (match := finder.feed(piece)) is not None:
            return match
    return None


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["abc"], ["b"], ("b", 1, 2)),
        (["a", "b", "c"], ["abc"], ("abc", 0, 3)),  # across three pieces
        (["xab", "cd"], ["abc", "ab"], ("ab", 1, 3)),  # one is a prefix of the other
        (["xabc"], ["abc", "bc"], ("abc", 1, 4)),  # a tie: the order of the list
        (["xabc"], ["bc", "abc"], ("bc", 2, 4)),
        (["aa", "ab"], ["aab"], ("aab", 1, 4)),
        (["", "a", ""], ["a"], ("a", 0, 1)),
        (["ab"], ["ba"], None),
    ],
)
def test_examples(pieces, stops, expected):
    assert find(pieces, stops) == expected


TEXTS = st.lists(st.text("ab", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4, unique=True)


@given(TEXTS, STOPS)
def test_any_cutting_finds_the_first_match_of_the_whole(pieces, stops):
    assert find(pieces, stops) == first_match("".join(pieces), stops)


@given(TEXTS, STOPS, st.integers(0, 12))
def test_no_match_ends_in_what_is_skipped(pieces, stops, num_skipped):
    boundary = len("".join(pieces[:num_skipped]))
    assert find(pieces, stops, num_skipped) == first_match("".join(pieces), stops, boundary)
