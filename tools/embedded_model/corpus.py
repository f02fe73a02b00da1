"""The training text: the running Python's standard library, in the forms that training uses."""

from __future__ import annotations

import ast
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from embedded_model.tokenizer import ASSISTANT, END, SYSTEM, USER, plain_ids

# Never trained on; in every supported Python, so that anybody can repeat the held-out loss.
HELD_OUT = (
    "asyncio/locks.py",
    "calendar.py",
    "concurrent/futures/thread.py",
    "csv.py",
    "email/message.py",
    "fractions.py",
    "graphlib.py",
    "heapq.py",
    "http/cookies.py",
    "json/decoder.py",
    "logging/handlers.py",
    "shlex.py",
    "statistics.py",
    "textwrap.py",
    "urllib/robotparser.py",
    "wsgiref/handlers.py",
    "zipapp.py",
)
# Tests, and files that are tables or prose rather than code.
LEFT_OUT_FOLDERS = {
    "site-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
LEFT_OUT_FILES = {"html/entities.py", "lib2to3/pgen2/grammar.py", "keyword.py", "stringprep.py"}


def library_files() -> list[Path]:
    """Return the training files of the running Python's standard library, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if LEFT_OUT_FOLDERS & set(name.parts) or name.name.startswith("_sysconfigdata"):
            continue
        if name.as_posix() not in HELD_OUT and name.as_posix() not in LEFT_OUT_FILES:
            found.append(file)
    return found


def held_out_texts() -> list[str]:
    """Return the text of the held-out files that this Python has."""
    root = Path(sysconfig.get_path("stdlib"))
    return [read_text(root / name) for name in HELD_OUT if (root / name).exists()]


def read_text(file: Path) -> str:
    """Read a source file; bytes that are not UTF-8 (a few old headers) are read as Latin-1."""
    data = file.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return text.replace("\r\n", "\n").expandtabs(8)


def parsed(text: str) -> ast.Module | None:
    """Return the syntax tree, or None where the file is not valid for this Python."""
    try:
        return ast.parse(text)
    except SyntaxError:  # deliberately broken samples exist in the library
        return None


def definitions(text: str, tree: ast.Module) -> list[str]:
    """Cut the top-level functions and classes out of a file, decorators included."""
    lines = text.splitlines(keepends=True)
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(source_of(node, lines))
    return found


def source_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: list[str]) -> str:
    """Return the source of a definition, decorators included, moved to the left margin."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip() + "\n"


def chat_turns(text: str, tree: ast.Module) -> list[tuple[str, str]]:
    """Pair what the docstring of each short function says with the function's source."""
    lines = text.splitlines(keepends=True)
    turns = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        says = ast.get_docstring(node)
        if says and (node.end_lineno or 0) - node.lineno < 40:
            turns.append((" ".join(says.split("\n\n")[0].split()), source_of(node, lines)))
    return turns


@dataclass(frozen=True)
class Document:
    """One file in the three forms that training shows it in, as token ids."""

    whole: list[int]
    cut: list[list[int]]
    chats: list[list[int]]


def read_documents(tokenizer: Tokenizer, files: list[Path]) -> list[Document]:
    """Tokenize the corpus once; each form of a file starts with BEGIN and ends with END."""
    documents = []
    for file in files:
        text = read_text(file)
        if not text.strip():
            continue
        tree = parsed(text)
        cut = definitions(text, tree) if tree else []
        documents.append(
            Document(
                whole=plain_ids(tokenizer, text),
                cut=[plain_ids(tokenizer, piece) for piece in cut],
                chats=chat_ids(tokenizer, text, tree) if tree else [],
            )
        )
    return documents


def chat_ids(tokenizer: Tokenizer, text: str, tree: ast.Module) -> list[list[int]]:
    """Make conversations of three turns; half have the module's first line as the system's text."""
    turns = chat_turns(text, tree)
    system = (ast.get_docstring(tree) or "").strip().split("\n")[0]
    chats = []
    for first in range(0, len(turns), 3):
        chat = f"{SYSTEM}{system}" if system and first % 2 else ""
        for question, answer in turns[first : first + 3]:
            chat += f"{USER}{question}{ASSISTANT}{answer}{END}"
        chats.append(tokenizer.encode(chat).ids)
    return chats


def epoch_ids(documents: list[Document], epoch: int) -> np.ndarray:
    """Lay all documents end to end in a new order: files whole or cut up, and half of the chats."""
    random = np.random.default_rng([7, epoch])
    pieces: list[list[int]] = []
    for document in documents:
        take_whole = not document.cut or random.random() < 0.6
        pieces += [document.whole] if take_whole else document.cut
        pieces += [chat for chat in document.chats if random.random() < 0.5]
    order = random.permutation(len(pieces))
    return np.concatenate([np.asarray(pieces[i], dtype=np.int32) for i in order])


class Batches:
    """Endless training batches; (epoch, window, cell) and the step decide what comes next.

    The first 40 % of the time goes to windows of 256 tokens, where attention is cheap, the rest
    to windows of 512, each seen once per epoch. In that second part every sixth batch has windows
    of 2,048 or 4,096 tokens from random places, so that the model learns to use a long context.
    """

    def __init__(self, documents: list[Document], tokens: int) -> None:
        self.documents, self.tokens = documents, tokens
        self.start_epoch(0, 256)

    def start_epoch(self, epoch: int, window: int) -> None:
        """Lay out `epoch` and cut it into cells of `window` tokens."""
        self.epoch, self.window, self.cell = epoch, window, 0
        self.ids = epoch_ids(self.documents, epoch)
        cells = (len(self.ids) - 1) // window
        self.order = np.random.default_rng([8, epoch]).permutation(cells)

    def take(self, step: int, progress: float) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, [R, window] int64; `progress` is the spent share of time."""
        window = 256 if progress < 0.4 else 512
        length = window
        if progress >= 0.4 and step % 6 == 5:
            length = 4096 if step % 24 == 23 else 2048
        starts = self.cells(window) if length == window else self.anywhere(step, length)
        windows = np.stack([self.ids[s : s + length + 1] for s in starts]).astype(np.int64)
        return torch.from_numpy(windows[:, :-1]), torch.from_numpy(windows[:, 1:])

    def cells(self, window: int) -> np.ndarray:
        """Return the starts of the next unseen windows, of a new epoch when this one is used up."""
        rows = self.tokens // window
        if window != self.window or self.cell + rows > len(self.order):
            self.start_epoch(self.epoch + 1, window)
        self.cell += rows
        return self.order[self.cell - rows : self.cell] * window

    def anywhere(self, step: int, length: int) -> np.ndarray:
        """Return random starts of long windows."""
        rows = max(1, self.tokens // length)
        return np.random.default_rng([9, step]).integers(0, len(self.ids) - length - 1, rows)
