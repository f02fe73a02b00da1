"""Nothing hollow on the wire: what there is a name for is sent by somebody and handled by somebody,
or its docstring says that it is reserved.
"""

import ast
import re

import pytest

from tests.house.package import MODULES

HOMES = ("quire.engine.wire.messages", "quire.engine.wire.output_parts")
MESSAGES = [module for module in MODULES if module.name in HOMES]
OF_PROGRAMS = ("quire.engine.wire.core_output", "quire.engine.wire.documented")
"""What programs make and read is not what the engine sends."""
OTHERS = [
    module for module in MODULES
    if module.name.startswith("quire.engine") and module.name not in (*HOMES, *OF_PROGRAMS)
]  # fmt: skip
READ_BY_POLLING = {"WAKEUP", "EXECUTOR_FAILED"}
"""Any byte on that pipe ends a poll; nobody looks which."""
PUBLISHED = {"ReconfigureDistributedRequest", "ReconfigureRankType", "EXECUTOR_FAILED"}
"""What is reserved. The list only shrinks."""

CLASSES = {
    node.name: node
    for each in MESSAGES
    for node in each.tree.body
    if isinstance(node, ast.ClassDef)
}


def is_struct(node):
    return any(isinstance(base, ast.Attribute) and base.attr == "Struct" for base in node.bases)


def members(kind):
    """Names of an enumeration -> the docstring below each."""
    found, last = {}, None
    for node in CLASSES[kind].body:
        if isinstance(node, ast.Assign):
            last = node.targets[0].id
            found[last] = ""
        elif last and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[last], last = node.value.value, None
    return found


def fields():
    """(field, the text of its type) of every message."""
    for node in filter(is_struct, CLASSES.values()):
        for each in node.body:
            if isinstance(each, ast.AnnAssign):
                yield each.target.id, ast.unparse(each.annotation)


def uses(tree, member):
    """The nodes around a member of an enumeration."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == member:
            around = parents[node]
            while isinstance(around, ast.Attribute | ast.List | ast.Tuple):
                around = parents[around]
            yield around


def is_sent(member, trees):
    return any(
        isinstance(around, ast.Call | ast.Assign) for tree in trees for around in uses(tree, member)
    )


def is_handled(member, trees):
    return any(
        isinstance(around, ast.Dict | ast.Compare)
        for tree in trees
        for around in uses(tree, member)
    )


def is_made(name, trees):
    """Whether somebody calls the class, or a class method of it."""
    called = (node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = (f.value if isinstance(f, ast.Attribute) else f for f in called)
    return any(isinstance(each, ast.Name) and each.id == name for each in names)


def is_read(name, trees, of_fields):
    """Whether a message is decoded as such, or the field that has it is read."""
    holders = {field for field, kind in of_fields if name in re.findall(r"\w+", kind)}
    for tree in trees:
        called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            is_name = isinstance(node, ast.Name) and node.id == name and node not in called
            is_field = isinstance(node, ast.Attribute) and node.attr in holders
            if is_name or (is_field and isinstance(node.ctx, ast.Load)):
                return True
    return False


TREES = [module.tree for module in OTHERS]
OWN_TREES = [module.tree for module in MESSAGES]
KINDS = members("EngineCoreRequestType")
STRUCTS = [name for name, node in CLASSES.items() if is_struct(node)]


def is_reserved(text):
    return "Reserved" in (text or "")


@pytest.mark.parametrize("member", KINDS)
def test_a_type_of_message_is_sent_and_handled(member):
    if is_reserved(KINDS[member]):
        assert member in PUBLISHED
        return
    assert is_sent(member, TREES), f"nobody sends {member}"
    assert member in READ_BY_POLLING or is_handled(member, TREES), f"nobody handles {member}"


@pytest.mark.parametrize("name", STRUCTS)
def test_a_message_is_made_and_read(name):
    if is_reserved(ast.get_docstring(CLASSES[name])):
        assert name in PUBLISHED
        return
    assert is_made(name, [*TREES, *OWN_TREES]), f"nobody makes {name}"
    assert is_read(name, TREES, list(fields())), f"nobody reads {name}"


@pytest.mark.parametrize("kind", ["EngineCoreEventType", "ReconfigureRankType"])
def test_a_member_is_used(kind):
    if is_reserved(ast.get_docstring(CLASSES[kind])):
        assert kind in PUBLISHED
        return
    shown = [module.tree for module in MODULES if module.name in OF_PROGRAMS]
    used = {node.attr for tree in [*TREES, *OWN_TREES, *shown] for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)}  # fmt: skip
    assert set(members(kind)) <= used


def test_what_nobody_sends_or_handles_is_found():
    only_sent = ast.parse("self.sockets.send(0, _Kind.ADD, request)")
    only_handled = ast.parse("decoders = {_Kind.ADD.value: decode}")
    assert is_sent("ADD", [only_sent]) and not is_handled("ADD", [only_sent])
    assert is_handled("ADD", [only_handled]) and not is_sent("ADD", [only_handled])
    assert not is_sent("ABORT", [only_sent]) and not is_made("Hello", [only_sent])
    assert is_made("Hello", [ast.parse("send(Hello(1))")])
    held = [("hello", "Hello | None")]
    assert is_read("Hello", [ast.parse("x = outputs.hello")], held)
    assert not is_read("Hello", [ast.parse("outputs.hello = Hello(1)")], held)
    assert is_read("Hello", [ast.parse("decoder = Decoder(Hello)")], [])
