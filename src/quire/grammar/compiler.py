"""The grammars of a core: compiled in a thread, cached, with one constraint for each request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from quire.config.structured_outputs_config import StructuredOutputsConfig
from quire.errors import RequestError
from quire.grammar.constraint import Constraint
from quire.grammar.library import Form
from quire.grammar.masks import DraftedStep, StepMasks
from quire.grammar.prelude import IdPrelude, Marks, MarkTokens, Prelude, TextPrelude
from quire.grammar.source import GrammarSource, source_of
from quire.grammar.thinking import ThinkingBudget
from quire.grammar.vocabulary import Vocabulary, VocabularySource
from quire.params import SamplingParams, StructuredOutputsParams
from quire.params.thinking import Thinking
from quire.scheduling.request import Request
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import StepPlan

if TYPE_CHECKING:  # imported with the first form, by most engines never
    from quire.grammar.libraries import GrammarLibraries

T = TypeVar("T")

_MOST_CACHED_BYTES = 512 << 20
_MOST_MARKS = 16
_BYTES_PER_CHAR = 100
"""The memory that a compiled grammar takes for each character of its source, as a rule."""


class GrammarCompiler:
    """Makes constraints. A grammar's cost was checked before, in a process that could be killed
    (trial.py); here it is compiled in a thread that does not hold the interpreter's lock.

    The vocabulary is read with the first grammar. The oldest grammars are dropped as soon as all
    together take more than 512 MiB, by the growth of this process while they were compiled.
    """

    def __init__(
        self,
        vocabulary: VocabularySource | None,
        config: StructuredOutputsConfig | None = None,
        num_threads: int = 1,
    ) -> None:
        """`vocabulary` None refuses every grammar. Masks are filled on `num_threads` threads."""
        self._source = vocabulary
        self._config = config or StructuredOutputsConfig()
        self._num_threads = num_threads
        self._forms: OrderedDict[bytes, Future[Form]] = OrderedDict()
        self._bytes: dict[bytes, int] = {}
        self._marks: OrderedDict[Marks, Future[MarkTokens]] = OrderedDict()
        self._process = psutil.Process()
        self._thread: ThreadPoolExecutor | None = None
        self._libraries: GrammarLibraries | None = None
        self._vocabulary: Vocabulary | None = None

    def constraint(
        self, params: SamplingParams, thinking: Thinking | None = None
    ) -> Constraint | None:
        """Constraint of a grammar and a bound on reasoning, None without either; does not wait."""
        form = params.structured_outputs
        budget = None if thinking is None else ThinkingBudget(thinking)
        if form is None:
            return None if budget is None else Constraint(None, budget=budget)
        if self._source is None:
            raise RequestError("structured_outputs needs an engine with a tokenizer")
        compiled = self._compiled(source_of(form))
        prelude, needs = self._prelude(form)
        return Constraint(
            compiled,
            vocabulary=self._known_vocabulary,
            prelude=prelude,
            needs=needs,
            may_end=not params.ignore_eos,
            budget=budget,
        )

    def _prelude(
        self, form: StructuredOutputsParams
    ) -> tuple[Callable[[], Prelude] | None, list[Future[Any]]]:
        """The maker of a form's prelude (None: it has none), and the futures to be done before."""
        if form.starts_after is None:
            return None, []
        if form.starts_after_ids:
            return partial(IdPrelude, form.starts_after_ids), []
        marks = Marks(form.opening_texts, form.ending_texts)
        if marks not in self._marks:
            self._marks[marks] = self._start(lambda: MarkTokens(self._read()[0].tokens, marks))
            if len(self._marks) > _MOST_MARKS:
                self._marks.popitem(last=False)
        tokens = self._marks[marks]
        return lambda: TextPrelude(tokens.result(timeout=0)), [tokens]

    def masks_of(
        self, constrained: Mapping[int, Request]
    ) -> Callable[[StepPlan, DraftedStep], GrammarMask | None]:
        """Return the function that computes a step's masks, for these requests by row."""
        size = 0 if self._source is None else self._source.size
        return StepMasks(constrained, size).of

    def prepare(self) -> None:
        """Make the libraries now, in the thread, if the engine's settings say so: the first form
        waits for the rest alone. What cannot be made is told to each form.
        """
        if self._config.prepare and self._source is not None:
            self._start(lambda: self._read()[1].prepare())

    def close(self) -> None:
        """End the thread after its current grammar."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None

    def _known_vocabulary(self) -> Vocabulary:
        assert self._vocabulary is not None, "some form has been compiled"
        return self._vocabulary

    def _read(self) -> tuple[Vocabulary, GrammarLibraries]:
        """The vocabulary and the libraries for it, made with the first form."""
        if self._vocabulary is None or self._libraries is None:
            from quire.grammar.libraries import GrammarLibraries

            assert self._source is not None
            self._vocabulary = Vocabulary.read(self._source)
            backend = self._config.backend
            self._libraries = GrammarLibraries(self._vocabulary, backend, self._num_threads)
        return self._vocabulary, self._libraries

    def _compiled(self, source: GrammarSource) -> Future[Form]:
        key = source.digest
        if key in self._forms:
            self._forms.move_to_end(key)
        else:
            self._forms[key] = self._start(lambda: self._compile(source, key))
            if len(self._forms) > self._config.max_cached_grammars:
                self._drop_oldest()
            # the newest stays, whose request waits for it
            while len(self._forms) > 1 and sum(self._bytes.values()) > _MOST_CACHED_BYTES:
                self._drop_oldest()
        return self._forms[key]

    def _drop_oldest(self) -> None:
        key, _ = self._forms.popitem(last=False)
        self._bytes.pop(key, None)

    def _start(self, work: Callable[[], T]) -> Future[T]:
        if self._thread is None:
            # one thread: libraries are made and used by one at a time
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        return self._thread.submit(work)

    def _compile(self, source: GrammarSource, key: bytes) -> Form:
        _, libraries = self._read()
        # libraries do not say what a grammar takes
        before = self._process.memory_info().rss
        form = libraries.compile(source)
        grown = self._process.memory_info().rss - before
        if key in self._forms:
            self._bytes[key] = max(grown, _BYTES_PER_CHAR * len(source.text))
        return form
