"""A counted trie of all stretches of some texts, up to a depth, which texts may be taken out of.

A stretch that occurs once is not spelt out: its node points into its text, and gets children when
a second stretch goes on from it. So ordinary text takes a few nodes per token, whatever the depth.
"""

from __future__ import annotations


class Node:
    """The stretches that end here: how many there are, and what follows them. A node without
    children stands for one stretch, which goes on in `text` at `place`.
    """

    __slots__ = ("children", "count", "place", "text")

    def __init__(self, text: list[int], place: int) -> None:
        self.count = 1
        self.children: dict[int, Node] | None = None
        self.text = text
        self.place = place


class SuffixTrie:
    """Invariants: the count of a node is at least the sum of its children's; `num_nodes` counts all
    nodes but the root.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.num_nodes = 0
        self._root = Node([], 0)
        self._root.children = {}

    def grow(self, text: GrowingText, token: int) -> None:
        """Append a token to a text of this trie."""
        text.tokens.append(token)
        ends, self._root.count = [], self._root.count + 1
        for node in [*text.ends, self._root]:
            end = self._descend(node, text, token)
            if end is not None:
                ends.append(end)
        if len(ends) == self.depth:  # the longest can get no longer
            del ends[0]
        text.ends = ends

    def remove(self, text: GrowingText) -> None:
        """Take a text out. Its ends are meaningless from then on."""
        tokens, text.ends = text.tokens, []
        for start in range(len(tokens)):
            node = self._root
            node.count -= 1
            for token in tokens[start : start + self.depth]:
                children = node.children
                if children is None or token not in children:
                    break
                child = children[token]
                child.count -= 1
                if child.count == 0:
                    self.num_nodes -= _size(child)
                    del children[token]
                    break
                if child.text is tokens:
                    child.text, child.place = [], 0
                node = child

    def _descend(self, node: Node, text: GrowingText, token: int) -> Node | None:
        """Count one more `token` after a node -> its child; None where it is the first one, whose
        continuation need not be followed.
        """
        children = self._children(node)
        child = children.get(token)
        if child is None:
            children[token] = Node(text.tokens, len(text.tokens))
            self.num_nodes += 1
            return None
        child.count += 1
        return child

    def _children(self, node: Node) -> dict[int, Node]:
        """The children of a node, spelt out now if they are not."""
        if node.children is None:
            node.children = {}
            if node.place < len(node.text):
                node.children[node.text[node.place]] = Node(node.text, node.place + 1)
                self.num_nodes += 1
        return node.children


class GrowingText:
    """A text of a trie. `ends`: the nodes of its last tokens that occur elsewhere too, those of the
    longest stretch first.
    """

    __slots__ = ("ends", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends: list[Node] = []


def likeliest(node: Node, most: int, min_probability: float) -> tuple[list[int], float]:
    """Follow the children that occur most often -> up to `most` tokens, each as likely as
    `min_probability` together with those before it, and the sum of these likelihoods.
    """
    found: list[int] = []
    chance, score = 1.0, 0.0
    while len(found) < most:
        if node.children is None:
            chance /= node.count
            if chance >= min_probability:
                rest = node.text[node.place : node.place + most - len(found)]
                return found + rest, score + chance * len(rest)
            break
        if not node.children:
            break
        token, child = max(node.children.items(), key=_times)
        chance *= child.count / node.count
        if chance < min_probability:
            break
        found.append(token)
        score += chance
        node = child
    return found, score


def _times(entry: tuple[int, Node]) -> int:
    return entry[1].count


def _size(node: Node) -> int:
    """The number of nodes from this one on."""
    size, left = 0, [node]
    while left:
        children = left.pop().children
        size += 1
        left += children.values() if children else ()
    return size
