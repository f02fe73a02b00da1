"""Answers as nodes: only listed elements; formulas that cannot be drawn stay as written."""

import pytest

from quire.text.markup import draw
from quire.text.markup.code_shape import is_code
from quire.text.markup.formulas import MAX_FORMULA_CHARS, mathml
from quire.text.markup.nodes import MAX_NODES, nodes_of
from tests.server.page_texts import HOSTILE, RICH

_LINK = {"href": "https://x.test/b"}
MARKDOWN = {
    "# A *b*": [["h1", {}, ["A ", ["em", {}, ["b"]]]]],
    "a **b** __c__ ~~d~~ e_f_g": [
        ["p", {}, ["a ", ["strong", {}, ["b"]], " ", ["strong", {}, ["c"]], " ", ["s", {}, ["d"]],
                   " e_f_g"]]
    ],
    "3. a\n4. b": [["ol", {"start": "3"}, [["li", {}, ["a"]], ["li", {}, ["b"]]]]],
    "[a](https://x.test/b) [c](/d) [e](javascript:f) ![g](https://x.test/b)": [
        ["p", {}, [["a", _LINK, ["a"]], " ", ["a", {}, ["c"]], " [e](javascript:f) ",
                   ["a", _LINK, ["g"]]]]
    ],
    "https://x.test/b.": [["p", {}, [["a", _LINK, ["https://x.test/b"]], "."]]],
    "<b onclick=x>": [["p", {}, ["<b onclick=x>"]]],
    "```c\nint x;\n```": [
        ["pre", {"lang": "c"}, [["code", {}, [["span", {"class": "kt"}, ["int"]],
                                             ["span", {"class": "w"}, [" "]],
                                             ["span", {"class": "n"}, ["x"]],
                                             ["span", {"class": "p"}, [";"]]]]]]
    ],
    "```nothing\na < b\n```": [["pre", {"lang": "nothing"}, [["code", {}, ["a < b"]]]]],
    "a \\(\\foo{x_1 y_1}\\) b": [["p", {}, ["a ", ["code", {}, ["\\(\\foo{x_1 y_1}\\)"]], " b"]]],
    "it costs $5 or $10": [["p", {}, ["it costs $5 or $10"]]],
}  # fmt: skip


@pytest.mark.parametrize("text", MARKDOWN)
def test_markdown_becomes_nodes(text):
    assert draw(text, is_whole=True).nodes == MARKDOWN[text]


def names(nodes):
    for node in nodes:
        if not isinstance(node, str):
            yield node[0]
            yield from names(node[2])


def attributes(nodes):
    for node in nodes:
        if not isinstance(node, str):
            yield from node[1].items()
            yield from attributes(node[2])


@pytest.mark.parametrize("text", [
    HOSTILE,
    "$\\text{<img src=x onerror=y>}$ $\\href{javascript:x}{y}$ \\(\\style{a}{b}\\)",
    "[a]: javascript:x\n\n[a] <javascript:y> [b](vbscript:z)",
])  # fmt: skip
def test_hostile_texts_have_nothing_that_runs_or_loads(text):
    nodes = draw(text, is_whole=True).nodes
    harmful = {"script", "img", "iframe", "svg", "style", "base", "form", "link", "meta"}
    assert not harmful & set(names(nodes))
    for name, value in attributes(nodes):
        assert not name.startswith("on") and name not in ("src", "style")
        assert name != "href" or value.startswith(("http://", "https://", "mailto:"))


def test_what_markdown_lets_pass_is_removed_by_the_list():
    html = "<p onclick=x>a<script>b</script><a href=' javascript:c' style=d>e</a><img src=f>"
    nodes, num = nodes_of(html + '<span class="k evil">g</span>', frozenset({"k"}))
    assert nodes == [["p", {}, ["a", ["a", {}, ["e"]], ["span", {"class": "k"}, ["g"]]]]]
    assert num == 6


@pytest.mark.parametrize("text", ["> " * 300 + "a", "- " * 300 + "a", "$" + "{" * 3000 + "$"])
def test_deep_nesting_is_bounded(text):
    assert len(list(names(draw(text, is_whole=True).nodes))) < 500


def test_a_huge_table_is_shown_as_text():
    text = "|a" * 2000 + "\n" + "|-" * 2000 + "\n" + "|b\n" * 30 + "|c" * 2000
    nodes = draw(text, is_whole=True).nodes
    assert len(list(names(nodes))) < MAX_NODES


def test_blocks_are_drawn_when_nothing_can_change_them_any_more():
    text = RICH + "\n$$\na\n\n- b\n$$\n\nend [a][b]\n\n[b]: https://x.test/b\n"
    whole = draw(text.replace("[b]:", "[c]:"), is_whole=True).nodes
    for step in (1, 7, 50):
        drawn, at = [], 0
        for end in range(0, len(text) + step, step):
            rest = "".join(text.splitlines(keepends=True)[at:])
            sent = text.replace("[b]:", "[c]:")[:end][len(text) - len(rest) :]
            part = draw(sent, is_whole=end >= len(text))
            drawn, at = drawn + part.nodes, at + part.num_lines
        assert drawn == whole
    assert draw(text, is_whole=True).has_references


def test_formulas_are_drawn_or_left():
    assert "<mfrac>" in mathml("\\frac{a}{b}", is_display=False)
    aligned = mathml("\\begin{aligned} a &= b \\\\ &= c \\end{aligned}", is_display=True)
    assert aligned.count("<mtr>") == 2 and 'display="block"' in aligned
    for wrong in ("\\frac", "\\unknown{x}", "a & b", "a \\\\ b", "a_b_c", "{" * 3000, "x" * 5000):
        assert mathml(wrong, is_display=False) is None


@pytest.mark.parametrize("more", [0, 1, 2, 1000])
def test_a_formula_between_dollars_has_an_end_near_its_beginning(more):
    inside = "*a*" + "x" * (MAX_FORMULA_CHARS + more - 3)
    for text in (f"${inside}$", f"${inside}$ and", f"${inside}$5"):
        is_formula = not more and not text.endswith("5")
        assert (["em", {}, ["a"]] in draw(text, is_whole=True).nodes[0][2]) is not is_formula


@pytest.mark.parametrize(("text", "wanted"), [
    ("def f(a):\n    return a * 2\n", True),
    ("# sum\nimport os\nfor x in y:\n    print(x)\n", True),
    ("int main() {\n  return 0;\n}\n", True),
    ("```python\nx = 1\ny = 2\n```", False),
    ("Here is the plan. It has two parts:\n\n1. Read it\n2. Write it\n", False),
    ("# Title\n\nSome words about it, and others.\n", False),
    ("x = 1", False),
    ("\n" * 100_000, False),
])  # fmt: skip
def test_programs_without_fences_are_recognized(text, wanted):
    assert is_code(text) is wanted
