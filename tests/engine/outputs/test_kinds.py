"""A kind of output that nothing but its two halves knows reaches the caller."""

from quire.engine.client.journal import CoreJournal
from quire.engine.core.fault_isolation import GuardedStep, without
from quire.engine.frontend.output_processor import OutputProcessor
from quire.engine.outputs.kept_part import KeptPart, PartKind
from quire.engine.shared_cores.split_outputs import outputs_by_client
from quire.engine.wire.messages import CLIENT_SHIFT, EngineCoreOutputs, handles_in
from quire.params import SamplingParams
from quire.step.columns import PromptLogprobs, RunnerOutput
from quire.step.part import OutputPart, VerifiedDrafts
from quire.step.plan import StepPlan
from quire.step.result import StepResult
from tests.engine.core.core_over_hashes import request
from tests.engine.frontend.scripted_engines import make_engine, run


class Weight(OutputPart):
    """The kind: a number of each step."""

    grams: int


class Scale(KeptPart):
    """Its half in the front end: the sum."""

    def __init__(self, start):
        self.sum = start

    def add(self, part):
        if part.grams < 0:
            raise ValueError("nothing weighs less than nothing")
        self.sum += part.grams

    def join(self, shared):
        shared.prompt_logprobs = self.sum

    def end(self, completion, num_tokens):
        completion.routed_experts = (self.sum, num_tokens)


KIND = PartKind(Weight, lambda params, prompt, _: Scale(len(prompt)), asked_by="seed")


def engine_that_weighs():
    engine = make_engine(lambda request: [7, 8, 9])
    engine.front_end.outputs = OutputProcessor(None, kinds=(KIND,))
    for name, seed in (("0", 1), ("1", 1), ("2", None)):
        params = SamplingParams(max_tokens=3, detokenize=False, seed=seed)
        engine.add_request(name, {"prompt_token_ids": [5, 6]}, params)
    return engine


def test_a_completion_that_asks_has_its_parts_and_no_other():
    engine = engine_that_weighs()
    parts = [Weight(0, 10), Weight(2, 50), Weight(0, 3), Weight(1, 1), Weight(99, 1)]
    assert not engine.front_end.outputs.process(EngineCoreOutputs(parts=parts)).outputs
    ends = {output.request_id: output for output in run(engine) if output.finished}
    found = {
        name: (end.prompt_logprobs, end.outputs[0].routed_experts) for name, end in ends.items()
    }
    assert found == {"0": (15, (15, 5)), "1": (3, (3, 5)), "2": (None, None)}


def test_a_part_that_cannot_be_taken_in_ends_its_request_alone():
    engine = engine_that_weighs()
    parts = [Weight(0, -1), Weight(1, 1)]
    processed = engine.front_end.outputs.process(EngineCoreOutputs(parts=parts))
    assert processed.stopped == [0]
    [failed] = processed.outputs
    assert failed.outputs[0].finish_reason == "error" and failed.prompt_logprobs is None
    ends = {output.request_id: output.outputs[0] for output in run(engine) if output.finished}
    assert ends["1"].routed_experts == (3, 5)


def test_each_front_end_gets_the_parts_of_its_requests():
    other = 1 << CLIENT_SHIFT
    outputs = EngineCoreOutputs([4], [7], parts=[Weight(4, 1), Weight(other, 2), Weight(5, 3)])
    assert handles_in(outputs) == [4, other, 5]
    mine, others = outputs_by_client(outputs).values()
    assert [mine.parts, others.parts] == [[Weight(4, 1), Weight(5, 3)], [Weight(other, 2)]]


def test_a_step_that_ran_in_parts_has_the_parts_of_all():
    plan = StepPlan(4, [], [], [], [0, 1], [])
    step = GuardedStep(plan)
    for row in (0, 1):
        output = RunnerOutput(StepResult(4, [50 + row]), parts=[Weight(row, row)])
        launched = type("Launched", (), {"result": lambda self, output=output: output})()
        step.parts.append((without(plan, {1 - row}), launched))
    assert step.result().parts == [Weight(0, 0), Weight(1, 1)]


def test_a_part_that_is_reported_once_is_not_asked_for_again():
    journal = CoreJournal(0)
    for handle in range(3):
        assert journal.add(request(handle))
    once = PromptLogprobs(1, None, None, None)
    parts = [once, Weight(2, 1), VerifiedDrafts(0, 1, 1), PromptLogprobs(9, None, None, None)]
    journal.take(EngineCoreOutputs([0, 1, 2], [7] * 6, [2, 2, 2], parts=parts))
    journal.died([])
    journal.restarted()
    again = {message.handle: message.prompt_logprobs_done for message in journal.due()}
    assert again == {0: False, 1: True, 2: False}
