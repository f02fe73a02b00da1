"""What may come before a form: every token is allowed just where it may lead to a right output."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams, embedded
from quire.config.structured_outputs_config import StructuredOutputsConfig
from quire.errors import InvalidParameter
from quire.grammar.bits import mask_words
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.constraint import GrammarFailure
from quire.grammar.prelude import BLANKS, MOST_BLANKS, Marks, MarkTokens, Stage, TextPrelude
from quire.grammar.vocabulary import Vocabulary, VocabularySource
from quire.params import StructuredOutputsParams as Form

TOKENS = [
    *(b"", b" ", b"\n\n", b"<", b"<t", b"t", b"t>", b">", b"<t>", b" <", b" <t>\n", b"<t>a", b"a"),
    *(b"</", b"/", b"</t>", b"</t>\n", b"a</t>", b"a</t>b", b"t>b", b"b", b"<t></t>", b"/t>"),
    *(b"<</t>", b"{", b">{"),
]
OPEN, END = b"<t>", b"</t>"
MARKS = MarkTokens(TOKENS, Marks(("<t>",), ("</t>",)))
JUST_END = MarkTokens(TOKENS, Marks((), ("</t>",)))
TWO = MarkTokens(TOKENS, Marks(("<t>", "<a"), ("</t>", "t>b")))


def ids_of(mask):
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))


def stage_of(tokens, text):
    """The stage after a text, and how much of it is beyond the end: by looking at all of it."""
    if tokens.opens:
        stripped = text.lstrip(BLANKS)
        if len(text) - len(stripped) > MOST_BLANKS:
            return None, 0
        opening = next((mark for mark in tokens.opens if stripped.startswith(mark)), None)
        if opening is None:
            is_opening = any(mark.startswith(stripped) for mark in tokens.opens)
            return (Stage.OPENING if is_opening else None), 0
        text = stripped[len(opening) :]
    ends = [text.find(mark) + len(mark) for mark in tokens.ends if mark in text]
    return (Stage.OVER, len(text) - min(ends)) if ends else (Stage.INSIDE, 0)


@pytest.mark.parametrize("tokens", [MARKS, JUST_END, TWO], ids=["optional", "open", "two"])
@given(path=st.lists(st.integers(1, len(TOKENS) - 1), max_size=8))
@settings(max_examples=300)
def test_every_token_of_every_state(tokens, path):
    """Without a form, so that only what leads through the prelude is allowed."""
    prelude, text = TextPrelude(tokens), b""
    for index in path:
        mask = np.zeros(mask_words(len(TOKENS)), dtype=np.int32)
        prelude.restrict(mask)
        allowed = ids_of(mask)
        was_opening = prelude.stage is Stage.OPENING
        for other, token in enumerate(TOKENS):
            stage, beyond = stage_of(tokens, text + token)
            is_right = stage is not None and beyond == 0
            if was_opening:  # one token does not open and end
                is_right = is_right and stage is not Stage.OVER and token != b""
            assert (other in allowed) == is_right, (text, token)
        if index not in allowed:
            return
        prelude.take(index)
        text += TOKENS[index]
        assert prelude.stage is stage_of(tokens, text)[0]
        if prelude.stage is Stage.OVER:
            return


@given(path=st.lists(st.integers(1, len(TOKENS) - 1), max_size=8), cut=st.integers(0, 8))
def test_the_way_back(path, cut):
    prelude, other = TextPrelude(MARKS), TextPrelude(MARKS)
    for index in path[:cut]:
        prelude.take(index)
        other.take(index)
    state = prelude.state()
    for index in path[cut:]:
        prelude.take(index)
    prelude.return_to(state)
    assert (prelude.stage, prelude.state()) == (other.stage, other.state())


CHOICES = ["<a", "<think", " <think>x", "no", "<think>never</think>"]
"""Some begin as a reasoning does. The last two contain its marks, so nobody can choose them."""
THINK = {"opens_with": "<think>", "starts_after": "</think>"}


@pytest.fixture(scope="module", params=["guidance", "xgrammar"])
def compiler(request):
    source = VocabularySource(str(embedded.path()), "hf", 3072)
    made = GrammarCompiler(source, StructuredOutputsConfig(backend=request.param))
    yield made
    made.close()


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.read(VocabularySource(str(embedded.path()), "hf", 3072))


def constraint_of(compiler, **fields):
    params = SamplingParams(structured_outputs=Form(**fields))
    made = compiler.constraint(params)
    while not made.is_ready:
        made.wait(60)
    return made


def mask_of(constraint, ids):
    matcher = constraint.advance(ids)
    mask = np.zeros((1, mask_words(3072)), dtype=np.int32)
    if matcher is not None:
        matcher.library.fill([(matcher, 0)], mask)
    constraint.restrict(mask[0])
    return ids_of(mask[0])


def may_begin(text):
    """Whether a text is the beginning of a right output, its prelude still going on or not."""
    stage, beyond = stage_of_think(text)
    if stage is Stage.OVER:
        answer = text[len(text) - beyond :] if beyond else b""
        return any(choice.encode().startswith(answer) for choice in CHOICES)
    is_form = any(choice.encode().startswith(text) for choice in CHOICES)
    return stage is not None or is_form


def is_whole(text):
    stage, beyond = stage_of_think(text)
    if stage is Stage.OVER:
        return text[len(text) - beyond :].decode() in CHOICES if beyond else False
    return stage is not Stage.INSIDE and text.decode() in CHOICES


def stage_of_think(text):
    tokens = MarkTokens([b"x"], Marks(("<think>",), ("</think>",)))
    return stage_of(tokens, text)


BYTES = sorted({*"".join(CHOICES).encode(), *b" \n<think>/ab"})


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_text_by_text_with_a_form(compiler, vocabulary, data):
    """One character at a time: allowed is what may begin a reasoning, or the form, and no more."""
    single = {token: i for i, token in enumerate(vocabulary.tokens) if len(token) == 1}
    constraint = constraint_of(compiler, choice=CHOICES, **THINK)
    text, ids = b"", []
    for _ in range(data.draw(st.integers(1, 30))):
        if constraint.has_ended(ids):
            break
        allowed = mask_of(constraint, ids)
        for byte in BYTES:
            index = single[bytes([byte])]
            assert (index in allowed) == may_begin(text + bytes([byte])), (text, bytes([byte]))
        eos = vocabulary.eos_ids[0]
        assert (eos in allowed) == is_whole(text)
        may = [byte for byte in BYTES if single[bytes([byte])] in allowed]
        if not may:
            break
        # What is written spells the marks often enough.
        byte = data.draw(st.sampled_from(may))
        text += bytes([byte])
        ids.append(single[bytes([byte])])


def spelled(vocabulary, text):
    single = {token: i for i, token in enumerate(vocabulary.tokens) if len(token) == 1}
    return [single[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize(
    ("text", "goes_on"),
    [
        ("", True),
        ("n", True),
        ("no", True),
        (" \n\t", True),
        ("\n<think>\nhm no {} </thin", True),
        ("<think></think>", True),
        ("<think>a</think><think>ne", True),
        (" " * 8 + "<think>", True),
        (" " * 9, False),
        ("<think>a</think>no", True),
        ("<think>a</think> ", True),
        ("<think>a</think>\n", False),
        ("yes", False),
        ("\nno", False),
        ("</think>no", False),
        ("<thinking", False),
    ],
)
def test_an_output_that_comes_again_is_followed_or_refused(compiler, vocabulary, text, goes_on):
    """At once, and piece by piece, it comes to the same state."""
    ids = spelled(vocabulary, text)
    whole, pieces = (constraint_of(compiler, choice=CHOICES, **THINK) for _ in range(2))
    if not goes_on:
        with pytest.raises(GrammarFailure, match="left the grammar"):
            whole.advance(ids)
        return
    for end in range(len(ids)):
        pieces.advance(ids[:end])
    assert mask_of(whole, ids) == mask_of(pieces, ids)


@given(st.lists(st.sampled_from("<think>/ no\nax"), max_size=24), st.integers(0, 24))
@settings(max_examples=80, deadline=None)
def test_drafts_leave_no_trace(compiler, vocabulary, letters, cut):
    """Whatever was drafted, right or wrong, the constraint is afterwards where it was."""
    ids = spelled(vocabulary, "".join(letters))
    constraint, fresh = (constraint_of(compiler, choice=CHOICES, **THINK) for _ in range(2))
    known = ids[:cut]
    try:
        before = mask_of(constraint, known)
    except GrammarFailure:
        return
    checkpoint = constraint.checkpoint()
    for index in ids[cut:]:
        if not constraint.take_draft(index):
            break
    constraint.return_to(checkpoint)
    assert mask_of(constraint, known) == before == mask_of(fresh, known)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"opens_with": "<t>"}, "it goes with texts in starts_after"),
        ({"opens_with": "<t>", "starts_after": [1, 2]}, "it goes with texts in starts_after"),
        ({"opens_with": [], "starts_after": "x"}, "1 to 64 characters"),
        ({"opens_with": "", "starts_after": "x"}, "1 to 64 characters"),
        ({"starts_after": ["x", 1]}, "must be a str"),
        ({"starts_after": ["x" * 65]}, "1 to 64 characters"),
        ({"starts_after": ["x"] * 9}, "at most 8"),
    ],
)
def test_marks_that_cannot_be(fields, words):
    with pytest.raises(InvalidParameter, match=words):
        Form(regex="a", **fields)


ANSWER = r"[ \t\r\n]{0,8}<think>((?!</think>)(?s:.))*</think>(left|right)|left|right"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}},
        {"async_scheduling": True},
        {"num_gpu_blocks_override": 14, "block_size": 16, "max_num_batched_tokens": 24},
        {"structured_outputs_config": {"backend": "xgrammar"}},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_an_engine_answers_at_once_or_after_a_reasoning(options):
    """The same tokens whatever the load, with drafts, and by both libraries."""
    form = Form(choice=["left", "right"], **THINK)
    marks = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    engine = {"max_model_len": 160, "max_num_seqs": 12, "reasoning_config": marks, **options}
    with LLM(**engine) as llm:
        encode = llm.get_tokenizer().encode
        leaning = [encode(text, add_special_tokens=False)[0] for text in ("left", "<")]
        params = [
            SamplingParams(
                temperature=1.0,
                seed=seed,
                max_tokens=60,
                thinking_token_budget=seed,
                structured_outputs=form,
                logit_bias={leaning[seed % 2]: 12.0},
            )
            for seed in range(12)
        ]
        outputs = llm.generate(["x = 1\n"] * 12, params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    assert all(re.fullmatch(ANSWER, text) for text in texts), texts
    assert 2 < sum("<think>" in text for text in texts) < 10
    assert texts == EXPECTED.setdefault("texts", texts)


EXPECTED = {}
