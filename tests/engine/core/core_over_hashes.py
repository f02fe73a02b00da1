"""A core over the hash model, and what its requests must get."""

from quire.engine.core.core import EngineCore
from quire.engine.wire.messages import EngineCoreRequest
from quire.params import SamplingParams
from quire.scheduling.scheduler import Scheduler
from quire.step.columns import RunnerOutput
from tests.support.simulation import invariants
from tests.support.simulation.hash_model import HashRunner, oracle
from tests.support.simulation.scheduler_settings import scheduler_config

VOCAB = 50


class FakeStep:
    def __init__(self, run):
        self._run = run

    def sample(self, mask=None):
        self._output = RunnerOutput(self._run())

    def result(self):
        return self._output


class FakeExecutor:
    """Runs plans on the hash model; `fail` is called with every plan and may raise."""

    def __init__(self, runner, fail=lambda plan: None, host_ids=False):
        self.runner = runner
        self.fail = fail
        self.host_ids = host_ids
        self.num_launched = 0

    def launch(self, plan):
        self.num_launched += 1
        self.fail(plan)
        return FakeStep(lambda: self.runner.execute(plan))

    def needs_host_ids(self, params):
        return self.host_ids

    def collective_rpc(self, method, args, kwargs):
        return []

    def shutdown(self):
        self.runner = None


def make_core(*, depth=1, fail=lambda plan: None, host_ids=False, **config):
    facts = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_len": 40,
        "key_size": 4,
        "num_blocks": 24,
        **config,
    }
    scheduler = Scheduler(scheduler_config(**facts))
    runner = HashRunner(
        num_blocks=facts["num_blocks"], block_size=facts["key_size"], vocab_size=VOCAB
    )
    return EngineCore(scheduler, FakeExecutor(runner, fail, host_ids), depth=depth)


def request(handle, length=6, max_tokens=10):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineCoreRequest(
        handle, list(range(1, length + 1)), params, seed=handle, arrival_time=0
    )


def expected(handle, length=6, max_tokens=10):
    ids = []
    while len(ids) < max_tokens:  # the oracle stops at EOS, which these requests ignore
        ids += oracle(
            [*range(1, length + 1), *ids], seed=handle, num_tokens=max_tokens - len(ids),
            vocab_size=VOCAB,
        )  # fmt: skip
    return ids


def drain(core):
    tokens, ends = {}, {}
    while core.has_work:
        out = core.step()
        invariants.check(core.scheduler)
        for handle, token in zip(out.handles, out.token_ids, strict=True):
            tokens.setdefault(handle, []).append(token)
        for end in out.finished:
            assert end.handle not in ends, "a request ended twice"
            ends[end.handle] = end
    invariants.check_idle(core.scheduler)
    return tokens, ends
