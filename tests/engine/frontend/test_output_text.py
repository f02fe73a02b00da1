"""From ids to text: the same text for any way of cutting the ids; nothing is taken back."""

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.frontend.output_text import DECODE_EVERY, OutputText
from quire.params import RequestOutputKind, SamplingParams

PIECES = ["", "a", "b", "ab", "ba", "aab", "\n", "é"]


class PieceText:
    """A detokenizer that looks ids up; `num_fed` counts them."""

    def __init__(self):
        self.num_fed = 0

    def feed(self, ids):
        self.num_fed += len(ids)
        return "".join(PIECES[token_id] for token_id in ids)


def make_text(detokenizer=None, kind=RequestOutputKind.CUMULATIVE, **fields):
    params = SamplingParams(max_tokens=None, output_kind=kind, **fields)
    return OutputText(detokenizer or PieceText(), params)


def cut(ids, widths):
    """The ids in runs of the given widths, the rest at the end."""
    start = 0
    for width in widths:
        yield ids[start : start + width]
        start += width
    if start < len(ids):
        yield ids[start:]


def expected(ids, stops, min_tokens, includes):
    """(number of kept ids, text, stop string) by looking at the whole text after each token."""
    boundary = len("".join(PIECES[i] for i in ids[:min_tokens]))
    for count in range(min_tokens + 1, len(ids) + 1):
        text = "".join(PIECES[i] for i in ids[:count])
        for end in range(boundary + 1, len(text) + 1):
            for stop in stops:
                if text[:end].endswith(stop):
                    return count, text[: end if includes else end - len(stop)], stop
    return len(ids), "".join(PIECES[i] for i in ids), None


IDS = st.lists(st.integers(0, len(PIECES) - 1), max_size=24)
WIDTHS = st.lists(st.integers(0, 5), max_size=24)
STOPS = st.lists(st.text("ab\né", min_size=1, max_size=4), max_size=3, unique=True)


@given(IDS, WIDTHS, STOPS, st.integers(0, 6), st.booleans())
def test_stops_where_the_whole_text_says(ids, widths, stops, min_tokens, includes):
    wanted = expected(ids, stops, min_tokens, includes)
    fields = {"stop": stops, "min_tokens": min_tokens, "include_stop_str_in_output": includes}
    whole = make_text(**fields)
    late = make_text(kind=RequestOutputKind.FINAL_ONLY, **fields)
    delta = make_text(kind=RequestOutputKind.DELTA, **fields)
    taken, stop = [], None
    for part in cut(ids, widths):
        stop = whole.feed(part)
        assert late.feed(part) == stop
        assert delta.feed(part) == stop
        if stop is not None:
            break
        taken.append(delta.take())
        assert wanted[1].startswith(whole.so_far()), "a visible character is never retracted"
        assert "".join(taken) == whole.so_far()
    for text in (whole, late, delta):
        text.close()
    taken.append(delta.take())
    assert (len(whole.token_ids), whole.so_far(), stop) == wanted
    assert (len(late.token_ids), late.so_far(), stop) == wanted
    assert (len(delta.token_ids), "".join(taken), stop) == wanted


@given(IDS, WIDTHS, STOPS, st.booleans())
def test_the_text_of_a_stop_token_counts_only_if_asked_for(ids, widths, stops, includes):
    ids = [*ids, 1]
    textual = ids if includes else ids[:-1]
    wanted = expected(textual, stops, 0, includes)
    text = make_text(stop=stops, include_stop_str_in_output=includes)
    stop = None
    parts = list(cut(ids, widths))
    while parts and not parts[-1]:
        parts.pop()
    for place, part in enumerate(parts):
        stop = text.feed(part, ends_request=place == len(parts) - 1)
        if stop is not None:
            break
    text.close()
    assert (text.so_far(), stop) == wanted[1:]
    assert text.token_ids == (ids if stop is None else ids[: wanted[0]])


def test_held_back_text_is_shown_at_the_end():
    text = make_text(kind=RequestOutputKind.DELTA, stop=["aaaa"])
    text.feed([2, 1, 1, 1])
    assert text.take() == "b"
    text.close()
    assert text.take() == "aaa"


def test_only_what_may_begin_a_stop_string_is_held_back():
    text = make_text(kind=RequestOutputKind.DELTA, stop=["aaaa", "a\nb"])
    text.feed([1, 1, 1])
    assert text.take() == ""
    text.feed([2])
    assert text.take() == "aaab"
    text.feed([1, 1, 6])
    assert text.take() == "a"
    assert text.feed([2]) == "a\nb"
    text.close()
    assert text.take() == ""


def test_nothing_is_decoded_while_nobody_looks():
    detokenizer = PieceText()
    text = make_text(detokenizer, RequestOutputKind.FINAL_ONLY)
    text.feed([1] * (DECODE_EVERY - 1))
    assert detokenizer.num_fed == 0
    text.feed([1])
    assert detokenizer.num_fed == DECODE_EVERY  # in portions, so that no end is a long stall
    text.feed([2, 3], ends_request=True)
    text.close()
    assert detokenizer.num_fed == DECODE_EVERY + 1
    assert text.so_far() == "a" * DECODE_EVERY + "b"


def test_abandoning_keeps_what_was_made():
    text = make_text(kind=RequestOutputKind.DELTA)
    text.feed([1, 2])
    text.abandon()
    text.close()
    assert text.take() == "ab"


def test_without_a_detokenizer_there_are_ids_alone():
    text = OutputText(None, SamplingParams(detokenize=False))
    text.feed([5, 6])
    text.close()
    assert (text.token_ids, text.so_far()) == ([5, 6], "")
