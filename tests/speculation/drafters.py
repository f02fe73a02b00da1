"""Drafters over recorded answers: always wrong, always right, spoiled, wild, or failing."""

import random

from quire import SamplingParams
from quire.errors import EngineError
from quire.runner.drafting.drafting import Drafting
from quire.runner.drafting.pace import FixedPace


class Watched:
    """A drafter that knows what is in its rows and counts what became of its drafts."""

    def __init__(self):
        self.requests = {}
        self.outputs = {}
        self.num_drafted = self.num_accepted = 0
        self.accepted = set()
        """Prompts and seeds of requests with accepted drafts."""

    def add_row(self, new):
        border = new.num_prompt_tokens
        self.requests[new.row] = (tuple(new.token_ids[:border]), new.seed)
        self.outputs[new.row] = list(new.token_ids[border:])

    def remove_row(self, row):
        self.requests.pop(row, None)  # it may have come before this drafter
        self.outputs.pop(row, None)

    def propose(self, rows, step):
        counts = []
        steps = zip(step.sampled, step.new_tokens, step.drafts.tolist(), step.limits, strict=True)
        for row, new, verified, most in steps:
            self.num_drafted += verified
            self.num_accepted += len(new) - 1
            if row not in self.requests:
                counts.append(0)
                continue
            if len(new) > 1:
                self.accepted.add(self.requests[row])
            self.outputs[row] += new
            drafts = self.drafts(row, most) if most else []
            rows.write_drafts(row, drafts)
            counts.append(len(drafts))
        return counts

    def drafts(self, row, most):
        return []


class Recorder(Watched):
    """Drafts nothing; `answers` are the outputs by prompt and seed."""

    def __init__(self):
        super().__init__()
        self.answers = {}

    def drafts(self, row, most):
        self.answers[self.requests[row]] = self.outputs[row]
        return []


class Replay(Watched):
    """Drafts the recorded answer, each token spoiled with a probability."""

    def __init__(self, answers, spoiled=0.0, vocab=3000, seed=0):
        super().__init__()
        self.answers, self.spoiled, self.vocab = answers, spoiled, vocab
        self.random = random.Random(seed)

    def drafts(self, row, most):
        done = len(self.outputs[row])
        answer = self.answers.get(self.requests[row], [])[done : done + most]
        return [self._spoil(token) for token in answer]

    def _spoil(self, token):
        if self.random.random() >= self.spoiled:
            return token
        return (token + 1 + self.random.randrange(self.vocab - 1)) % self.vocab


class Wild(Replay):
    """Drafts as much as it may, after the recorded answer too: stop ids, and tokens by chance."""

    def drafts(self, row, most):
        known = super().drafts(row, most)
        some = (0, 1, 2, 3, 7, self.vocab - 1)
        rest = [self.random.choice(some) for _ in range(most - len(known))]
        return known + rest


class Failing(Replay):
    """Raises now and then, after some drafts are written."""

    def propose(self, rows, step):
        counts = super().propose(rows, step)
        if self.random.random() < 0.3:
            raise RuntimeError("the proposer failed")
        if self.random.random() < 0.1:
            raise EngineError("with an error of the engine's")
        return counts


class Lying(Replay):
    """Says that there are more drafts than were wanted, or fewer rows."""

    def propose(self, rows, step):
        counts = super().propose(rows, step)
        return [most + 1 for most in step.limits] if self.random.random() < 0.4 else counts[1:]


def install(llm, drafter, num_tokens):
    """Have an engine use this drafter from now on."""

    def put(worker):
        head = worker.model_runner.heads.of(SamplingParams())
        head.drafting = Drafting(drafter, FixedPace(num_tokens))

    llm.collective_rpc(put)
