"""The offline face: order, defaults, queues, and that nothing is left behind."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.errors import EngineDeadError, EngineError, InvalidParameter, InvalidType, RequestError
from quire.llm import LLM
from quire.outputs import RequestOutput
from quire.params import BeamSearchParams, RequestOutputKind, SamplingParams
from tests.engine.frontend.scripted_engines import embedded_tokenizer, make_engine

ECHO = list(range(20, 84))


def make_llm(script=lambda request: ECHO, **options):
    return LLM.from_engine(make_engine(script, **options))


def client_of(llm):
    return llm.llm_engine.front_end.client


def assert_untouched(llm):
    """Nothing is queued anywhere, and the engine serves."""
    assert not client_of(llm).requests
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.wait_for_completion() == []
    assert [out.prompt for out in llm.generate(["x", "y"], use_tqdm=False)] == ["x", "y"]


def test_outputs_are_in_the_order_of_the_prompts():
    llm = make_llm(
        lambda request: ECHO, tokens_per_step=lambda handle: 4 - handle if handle < 3 else 1
    )
    prompts = ["zero", [7, 8], {"prompt": "two"}, {"prompt_token_ids": [9], "prompt": "three"}]
    params = [SamplingParams(max_tokens=1 + i) for i in range(4)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["zero", None, "two", "three"]
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3"]
    assert [output.outputs[0].token_ids for output in outputs] == [ECHO[: 1 + i] for i in range(4)]
    assert all(output.finished for output in outputs)
    assert params[0].output_kind is RequestOutputKind.CUMULATIVE, "the caller's object is not ours"


def test_no_prompts_no_outputs():
    assert make_llm().generate([]) == []
    assert make_llm().chat([]) == []


def test_defaults_come_from_the_model():
    llm = make_llm(sampling_defaults={"temperature": 0.5, "max_tokens": 3})
    llm.generate("a", use_tqdm=False)
    sent = client_of(llm).seen[0].sampling_params
    assert (sent.temperature, sent.max_tokens) == (0.5, 3)
    assert make_llm().get_default_sampling_params().max_tokens == 16
    llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
    assert client_of(llm).seen[1].sampling_params.temperature == 1.0, "given parameters stand alone"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"sampling_params": [SamplingParams()]},
            "sampling_params='<1 items>' is not allowed: it must be one value for all, or "
            "one for each of the 2 prompts.",
        ),
        (
            {"priority": [1, 2, 3]},
            "priority='<3 items>' is not allowed: it must be one value for all, or one for "
            "each of the 2 prompts.",
        ),
        (
            {"mm_processor_kwargs": {"a": 1}},
            "mm_processor_kwargs={'a': 1} is not allowed: this engine takes text alone.",
        ),
        (
            {"lora_request": "x"},
            "LoRA is not enabled: start the engine with enable_lora (--enable-lora).",
        ),
        ({"sampling_params": 5}, "params=5 is not allowed: it must be a SamplingParams."),
    ],
)
def test_refusals(options, text):
    llm = make_llm()
    with pytest.raises(RequestError) as caught:
        llm.generate(["a", "b"], use_tqdm=False, **options)
    assert str(caught.value) == text
    assert_untouched(llm)


def test_priorities_reach_the_core():
    llm = make_llm()
    llm.generate(["a", "b"], priority=[3, 1], use_tqdm=False)
    llm.generate(["a", "b"], priority=2, use_tqdm=False)
    assert [request.priority for request in client_of(llm).seen] == [3, 1, 2, 2]


@pytest.mark.parametrize("name", ["encode", "embed", "classify", "score"])
def test_a_model_that_generates_does_not_pool(name):
    arguments = ("a", "b") if name == "score" else ("a",)
    with pytest.raises(RequestError) as caught:
        getattr(make_llm(), name)(*arguments)
    assert str(caught.value) == (
        "encode(), embed(), classify() and score() are only supported for pooling models. Start "
        "the engine with runner='pooling', or a model that pools."
    )


def test_an_error_in_a_prompt_takes_back_those_before_it():
    llm = make_llm()
    with pytest.raises(InvalidParameter, match="prompt_token_ids=-5"):
        llm.generate(["a", "b", [-5], "c"], use_tqdm=False)
    assert client_of(llm).aborted == [0, 1]
    assert len(client_of(llm).seen) == 2, "prompts are taken one after the other"
    assert_untouched(llm)


def test_queueing_while_asleep():
    llm = make_llm()
    llm.sleep(level=0)
    ids = llm.enqueue(["a", "b"], SamplingParams(max_tokens=2), use_tqdm=False)
    assert ids == ["0", "1"]
    with pytest.raises(EngineError) as caught:
        llm.wait_for_completion(use_tqdm=False)
    assert str(caught.value) == (
        '2 requests wait, but the engine is asleep. Call wake_up(tags=["scheduling"]) first.'
    )
    llm.wake_up(tags=["scheduling"])
    outputs = llm.wait_for_completion(RequestOutput, use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert llm.wait_for_completion() == []


CHAT = [{"role": "user", "content": "hi"}]
CALLS = {
    "generate": lambda llm, **more: llm.generate(["b", "c"], **more),
    "chat": lambda llm, **more: llm.chat([CHAT, CHAT], **more),
    "beam_search": lambda llm, **more: llm.beam_search(
        ["b"], BeamSearchParams(beam_width=2, max_tokens=2), **more
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_while_asleep_leaves_nothing_queued(name):
    llm = make_llm()
    [earlier] = llm.enqueue("earlier", SamplingParams(max_tokens=3), use_tqdm=False)
    llm.sleep(level=0, mode="keep")
    with pytest.raises(EngineError, match="the engine is asleep"):
        CALLS[name](llm, use_tqdm=False)
    llm.wake_up()
    [later] = llm.enqueue("later", SamplingParams(max_tokens=2), use_tqdm=False)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [(out.request_id, out.prompt, len(out.outputs[0].token_ids)) for out in outputs] == [
        (earlier, "earlier", 3), (later, "later", 2),
    ]  # fmt: skip
    assert_untouched(llm)


class BrokenBar:
    """Raises when it is made, at its first update, or when it is closed."""

    def __init__(self, moment):
        self.moment = moment

    def __call__(self, total, desc, **options):
        self.at("made")
        return self

    def update(self, number):
        self.at("update")

    def set_postfix_str(self, text, refresh): ...

    def close(self):
        self.at("close")

    def at(self, moment):
        if moment == self.moment:
            raise ArithmeticError(moment)


@pytest.mark.parametrize("moment", ["made", "update", "close"])
@pytest.mark.parametrize("name", ["generate", "chat", "enqueue"])
def test_a_call_whose_bar_raises_leaves_nothing_queued(name, moment):
    calls = {**CALLS, "enqueue": lambda llm, **more: llm.enqueue(["b", "c"], **more)}
    llm = make_llm()
    llm.enqueue("earlier", use_tqdm=False)
    with pytest.raises(ArithmeticError, match=moment):
        calls[name](llm, use_tqdm=BrokenBar(moment))
    llm.enqueue("later", use_tqdm=False)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [out.prompt for out in outputs] == ["earlier", "later"]
    assert_untouched(llm)


@pytest.mark.usefixtures("terminal")
def test_ctrl_c_after_the_last_prompt_was_added_leaves_nothing_queued():
    class Pressing(Bar):
        def close(self):
            signal.raise_signal(signal.SIGINT)

    llm = make_llm()
    with pytest.raises(KeyboardInterrupt):
        llm.enqueue(["a", "b"], use_tqdm=Pressing)
    assert_untouched(llm)


def test_generate_leaves_queued_requests_to_their_caller():
    llm = make_llm(tokens_per_step=lambda handle: 1 if handle else 4)
    llm.enqueue("queued", use_tqdm=False)
    assert [out.prompt for out in llm.generate("mine", use_tqdm=False)] == ["mine"]
    assert [out.prompt for out in llm.wait_for_completion(use_tqdm=False)] == ["queued"]


def test_wait_for_completion_knows_two_types():
    with pytest.raises(InvalidType, match="it must be RequestOutput, PoolingRequestOutput"):
        make_llm().wait_for_completion(int)


class CtrlC:
    """Sends the signal in the middle of the second step, as a terminal does."""

    def __init__(self, times=1):
        self.steps = 0
        self.times = times
        self.finished_steps = 0

    def __call__(self):
        self.steps += 1
        if self.steps == 2:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
        self.finished_steps += 1


@pytest.fixture
def terminal():
    """SIGINT as a terminal has it; a shell's background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_leaves_no_trace_of_its_call(times, terminal):
    before = signal.getsignal(signal.SIGINT)
    press = CtrlC(times)
    llm = make_llm(before_step=press)
    llm.enqueue("queued", use_tqdm=False)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(n=2, max_tokens=4), use_tqdm=False)
    assert press.finished_steps == (2 if times == 1 else 1), "the first one waits for the step"
    assert signal.getsignal(signal.SIGINT) is before
    if times == 1:
        assert client_of(llm).aborted == [1, 2, 3, 4]
        assert [out.prompt for out in llm.wait_for_completion(use_tqdm=False)] == ["queued"]
    else:
        assert client_of(llm).aborted == [0, 1, 2, 3, 4], "the step was broken off"
    assert_untouched(llm)


def test_a_handler_of_the_callers_own_is_left_alone():
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    try:
        llm = make_llm(before_step=CtrlC())
        assert len(llm.generate(["a"], use_tqdm=False)) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [1]


def test_ctrl_c_while_prompts_are_added(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    llm = make_llm()
    monkeypatch.setattr(llm.llm_engine.get_tokenizer(), "encode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.enqueue([[4, 5], "b"], use_tqdm=False)
    monkeypatch.undo()
    assert_untouched(llm)


@pytest.mark.usefixtures("terminal")
def test_ctrl_c_in_the_middle_of_adding_a_prompt_waits_until_it_is_added(monkeypatch):
    llm, num_added = make_llm(), []
    add = client_of(llm).add_request

    def interrupted(request):
        signal.raise_signal(signal.SIGINT)
        add(request)
        num_added.append(request)

    monkeypatch.setattr(client_of(llm), "add_request", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], use_tqdm=False)
    assert len(num_added) == 1
    monkeypatch.undo()
    assert_untouched(llm)


def test_calls_of_several_threads_run_one_after_the_other():
    llm = make_llm(before_step=lambda: time.sleep(0.001))

    def call(name):
        outputs = llm.generate([name, f"{name}!"], SamplingParams(max_tokens=8), use_tqdm=False)
        assert not llm.is_sleeping()
        return [(output.prompt, output.outputs[0].token_ids) for output in outputs]

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(call, map(str, range(24)), timeout=60))
    assert found == [[(str(i), ECHO[:8]), (f"{i}!", ECHO[:8])] for i in range(24)]


@pytest.mark.usefixtures("terminal")
def test_ctrl_c_ends_the_wait_for_another_thread():
    begun, goes_on = threading.Event(), threading.Event()

    def hold():
        begun.set()
        assert goes_on.wait(60)

    llm = make_llm(before_step=hold)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(llm.generate, ["a"], use_tqdm=False)
        try:
            assert begun.wait(60)
            timer = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), 2))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["b"], use_tqdm=False)
        finally:
            goes_on.set()
        assert [output.prompt for output in other.result(60)] == ["a"]
    assert_untouched(llm)


def test_outputs_that_somebody_else_took_are_missed():
    llm = make_llm()
    llm.enqueue("a", use_tqdm=False)
    llm.llm_engine.abort_request("0")
    assert len(llm.llm_engine.step()) == 1
    with pytest.raises(EngineError) as caught:
        llm.wait_for_completion(use_tqdm=False)
    assert str(caught.value) == (
        "1 requests have ended, but not in this call: somebody else stepped the engine."
    )
    assert_untouched(llm)


def test_a_failure_of_the_engine_ends_the_call_and_its_requests():
    def fail():
        raise RuntimeError("broken")

    llm = make_llm(before_step=fail)
    with pytest.raises(RuntimeError):
        llm.generate(["a"], use_tqdm=False)
    client_of(llm)._before_step = lambda: None
    assert_untouched(llm)


def test_a_dead_engine_is_said_to_be_dead():
    def fail():
        raise EngineDeadError("gone")

    with pytest.raises(EngineDeadError):
        make_llm(before_step=fail).generate(["a"], use_tqdm=False)


class Bar:
    made = []

    def __init__(self, total, desc, **options):
        self.total, self.desc, self.count, self.closed, self.texts = total, desc, 0, False, []
        Bar.made.append(self)

    def update(self, number):
        self.count += number

    def set_postfix_str(self, text, refresh):
        self.texts.append(text)

    def close(self):
        self.closed = True


def test_the_bar_shows_prompts_and_tokens_per_second():
    Bar.made.clear()
    make_llm().generate(["a", "b", "c"], use_tqdm=Bar)
    (bar,) = Bar.made
    assert (bar.total, bar.count, bar.desc, bar.closed) == (3, 3, "Processed prompts", True)
    assert bar.texts[-1].startswith("input ")
    assert bar.texts[-1].endswith(" tokens/s")


def test_a_call_from_within_a_call_is_refused():
    class Calling(Bar):
        def update(self, number):
            llm.generate(["inner"], use_tqdm=False)

    llm = make_llm()
    with pytest.raises(EngineError, match="Call it after that call has returned"):
        llm.generate(["outer"], use_tqdm=Calling)
    assert_untouched(llm)


def test_a_real_bar_goes_to_standard_error(capsys):
    make_llm().generate(["a"])
    assert "Processed prompts: 100%" in capsys.readouterr().err
    make_llm().generate(["a"], use_tqdm=False)
    make_llm().wait_for_completion()
    assert capsys.readouterr().err == ""


def test_chat_renders_the_template_once():
    llm = make_llm()
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, use_tqdm=False)
    text = embedded_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert output.prompt == text
    assert output.prompt_token_ids == embedded_tokenizer().encode(text, add_special_tokens=False)
    outputs = llm.chat([messages, messages], SamplingParams(max_tokens=1), use_tqdm=False)
    assert [output.prompt for output in outputs] == [text, text]
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ mood }}"
    options = {"chat_template": template, "chat_template_kwargs": {"mood": "!"}}
    assert llm.chat(messages, use_tqdm=False, **options)[0].prompt == "[hi]!"
    assert llm.enqueue_chat(messages, use_tqdm=False) == ["4"]


def test_the_engines_template_comes_before_the_tokenizers():
    llm = make_llm()
    llm.llm_engine.front_end.chat_template = "engine: {{ messages[0].content }}"
    assert llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)[0].prompt == "engine: hi"


def test_a_chat_is_a_list_of_messages():
    with pytest.raises(InvalidType) as caught:
        make_llm().chat("hi")
    assert str(caught.value) == (
        "messages='hi' is not allowed: it must be a list of messages or a list of such lists."
    )


def test_the_context_manager_closes():
    with make_llm() as llm:
        assert llm.get_world_size() == 1
        assert llm.get_tokenizer() is embedded_tokenizer()
        assert llm.reset_prefix_cache()
    assert client_of(llm).is_shut_down
