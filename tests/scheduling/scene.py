"""A scheduler and a runner that samples what the test says: the stage of the example tests."""

from quire.params import SamplingParams
from quire.scheduling.request import Request
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.settings import KVGroupSpec
from quire.step.result import StepResult
from tests.support.simulation import invariants
from tests.support.simulation.scheduler_settings import scheduler_config

TOKEN = 7
"""What is sampled unless a test says otherwise; it ends nothing."""


def sliding(window):
    return KVGroupSpec("sliding", window)


STATE, NOTHING, FULL = KVGroupSpec("state"), KVGroupSpec("none"), KVGroupSpec("full")


class Scene:
    """Blocks have 4 tokens, and there is more of everything than a test needs unless it says so."""

    def __init__(self, resources=(), **config):
        facts = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_len": 64,
            "key_size": 4,
            "num_blocks": 101,
        }
        self.scheduler = Scheduler(scheduler_config(**facts | config), resources)
        self.outputs = {}
        """Handle -> the tokens that it got."""
        self.ends = {}
        """Handle -> why it ended."""
        self._tokens = {}
        self.allowance = None

    def add(self, handle, prompt, max_tokens=20, **request):
        """Queue a request; `prompt` is its ids, or how many ids that no other request has."""
        if isinstance(prompt, int):
            prompt = [1000 * (handle + 1) + i for i in range(prompt)]
        params = request.pop("params", None)
        if params is None:
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        made = Request(handle, list(prompt), params, **request)
        self.scheduler.add(made)
        return made

    def plan(self):
        """Schedule a step and leave it in flight; None where there is nothing to compute."""
        plan = self.scheduler.schedule(allowance=self.allowance)
        if plan is not None:
            invariants.check_plan(self.scheduler, plan)
            self._tokens[plan.step_id] = self._count(plan)
        invariants.check(self.scheduler)
        return plan

    def finish(self, plan, tokens=None, drafts=None, errors=None):
        """Read a step. tokens: handle -> its ids (default: one `TOKEN`); drafts: handle -> how many
        it has ready now; errors: handle -> what went wrong.
        """
        tokens, drafts = tokens or {}, drafts or {}
        rows = self.scheduler.running
        handles = [rows[row].handle if row in rows else None for row in plan.sampled_rows]
        ids = [tokens.get(handle, [TOKEN]) for handle in handles]
        result = StepResult(plan.step_id, [token for each in ids for token in each])
        if self.scheduler.config.num_drafts:
            result.counts = [len(each) for each in ids]
            result.num_drafts = [drafts.get(handle, 0) for handle in handles]
        result.errors = {self.row(handle): text for handle, text in (errors or {}).items()}
        out = self.scheduler.update(result)
        invariants.check(self.scheduler)
        new = iter(out.token_ids)
        for handle, count in zip(out.handles, out.counts or [1] * len(out.handles), strict=True):
            self.outputs.setdefault(handle, []).extend(next(new) for _ in range(count))
        self.ends.update((end.handle, end.reason.name) for end in out.finished)
        return out

    def step(self, **result):
        """Schedule a step and read it at once."""
        plan = self.plan()
        if plan is not None:
            self.finish(plan, **result)
        return plan

    def steps(self, count):
        return [self.step() for _ in range(count)]

    def row(self, handle):
        return self.scheduler.requests[handle].row

    def tokens(self, plan):
        """Handle -> how many tokens the step computes for it, drafts included."""
        return self._tokens[plan.step_id]

    def _count(self, plan):
        handles = {row: request.handle for row, request in self.scheduler.running.items()}
        drafts = plan.decode_drafts or [0] * len(plan.decode_rows)
        found = {handles[r]: 1 + d for r, d in zip(plan.decode_rows, drafts, strict=True)}
        return found | {handles[chunk.row]: chunk.num_tokens for chunk in plan.chunks}

    def blocks(self, handle, group=0):
        return list(self.scheduler.requests[handle].block_ids[group])

    @property
    def running(self):
        return sorted(request.handle for request in self.scheduler.running.values())

    @property
    def waiting(self):
        return [request.handle for request in self.scheduler.waiting]

    @property
    def num_free(self):
        return self.scheduler.memory.pool.num_free
