"""A core with adapters over the hash model: an adapter is a folder with a number in a file, and a
token depends on the number that is in the row's slot.
"""

import os
import random
import threading
import time
from concurrent.futures import Future

import pytest

from quire.engine.core.adapter_loading import FolderReader
from quire.engine.core.core import EngineCore
from quire.engine.core.features.adapters import AdapterStore
from quire.engine.wire.messages import AdapterRef, EngineCoreRequest
from quire.engine.wire.output_parts import FinishReason
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.scheduling.scheduler import Scheduler
from tests.engine.core.core_over_hashes import VOCAB, FakeExecutor, drain
from tests.support.simulation.hash_model import HashRunner, oracle
from tests.support.simulation.scheduler_settings import scheduler_config

CONFIG = "adapter_config.json"
PROMPT = list(range(1, 7))


class Workers:
    """Host memory: the numbers that were read and not dropped."""

    def __init__(self):
        self.kept, self.num_read, self.most = set(), 0, 0
        self.num_checked = 0
        self.gate = threading.Event()
        self.gate.set()

    def read_adapter(self, folder):
        self.gate.wait(30)
        self.num_read += 1
        try:
            with open(os.path.join(folder, CONFIG)) as file:
                number = int(file.read())
        except OSError:
            raise RequestError(f"there is no adapter in {folder}") from None
        except ValueError:
            raise RequestError("it is broken") from None
        self.kept.add(number)
        self.most = max(self.most, len(self.kept))
        return number

    def check_adapter(self, folder):
        self.num_checked += 1
        if not os.path.exists(os.path.join(folder, CONFIG)):
            raise RequestError(f"there is no adapter in {folder}")

    def drop_adapter(self, number):
        self.kept.discard(number)


class Library:
    def __init__(self, path, *, slots=2, most_kept=None, depth=1, passes=3, fail=None, serves=True):
        self.path, self.workers = path, Workers()
        scheduler = Scheduler(
            scheduler_config(
                max_num_seqs=6, max_num_batched_tokens=64, max_len=60, key_size=4,
                num_blocks=120, num_adapter_slots=slots, max_adapter_passes=passes,
            )
        )  # fmt: skip
        runner = HashRunner(num_blocks=120, block_size=4, vocab_size=VOCAB)
        store = AdapterStore(scheduler, self.workers, most_kept or slots)
        executor = FakeExecutor(runner, self._check if fail is None else fail)
        self.core = EngineCore(
            scheduler, executor, depth=depth, features=[store] if serves else None
        )

    def _check(self, plan):
        missing = {number for _, number in plan.adapter_loads} - self.workers.kept
        assert not missing, "a slot is filled with weights that are not in memory"

    def write(self, name, number, *, is_old=True):
        """Make or overwrite a folder; `is_old`: long enough ago that its times can be trusted."""
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        (folder / "new").write_text(str(number))
        (folder / "new").replace(folder / CONFIG)
        if is_old:
            time.sleep(0.11)  # times of change cannot be set

    def add(self, handle, name, *, adapter_id=1, number=0, max_tokens=10, output=()):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        ref = AdapterRef(name, adapter_id, str(self.path / name), number) if name else None
        self.core.add_request(
            EngineCoreRequest(
                handle, list(PROMPT), params, seed=0, arrival_time=0, adapter=ref,
                output_token_ids=list(output),
            )
        )  # fmt: skip

    def call(self, answer):
        """What a call gives, after the steps that it takes."""
        if not isinstance(answer, Future):
            return answer
        while not answer.done():
            self.core.step()
        return answer.result()

    def load(self, name, adapter_id=1, *, again=False):
        return self.call(self.core.add_lora(name, adapter_id, str(self.path / name), again))


def text_of(number, max_tokens=10):
    ids = []
    while len(ids) < max_tokens:
        ids += oracle(
            [*PROMPT, *ids], seed=0, num_tokens=max_tokens - len(ids), vocab_size=VOCAB,
            adapter=number,
        )  # fmt: skip
    return ids


@pytest.fixture
def library(tmp_path):
    made = Library(tmp_path)
    for number in (7, 8, 9):
        made.write(str(number), number, is_old=number == 9)
    yield made
    made.workers.gate.set()
    made.core.shutdown()


def texts(library):
    tokens, ends = drain(library.core)
    assert {end.reason for end in ends.values()} == {FinishReason.LENGTH}, ends
    return tokens


def test_each_request_gets_the_text_of_its_adapter(library):
    for handle, name in enumerate(["7", None, "8", "7", "9", None]):
        library.add(handle, name, adapter_id=handle + 1)
    found = texts(library)
    assert [found[h] for h in range(6)] == [text_of(n) for n in (7, 0, 8, 7, 9, 0)]
    assert library.workers.num_read <= 4, "one had to leave memory before its turn"


def test_others_go_on_while_a_folder_is_read(library):
    library.workers.gate.clear()
    library.add(0, None)
    library.add(1, "7")
    out = [library.core.step() for _ in range(10)]
    assert [token for each in out for token in each.token_ids] == text_of(0)
    library.workers.gate.set()
    assert texts(library) == {1: text_of(7)}


def test_a_bad_adapter_costs_its_request_a_sentence(library):
    library.write("bad", "no number")
    library.add(0, "bad")
    library.add(1, "gone", adapter_id=2)
    library.add(2, "7", adapter_id=3)
    tokens, ends = drain(library.core)
    assert tokens == {2: text_of(7)}
    assert ends[0].reason is FinishReason.ERROR
    assert ends[0].message == "the LoRA adapter 'bad': it is broken"
    assert ends[1].message.startswith("the LoRA adapter 'gone': there is no adapter in /")


def test_a_reader_s_own_failure_is_its_request_s_too(library, monkeypatch):
    monkeypatch.setattr(library.core.adapters._reader, "_read", lambda folder: 1 // 0)
    library.add(0, "7")
    library.add(1, None)
    tokens, ends = drain(library.core)
    assert tokens == {1: text_of(0)}
    assert ends[0].message == "the LoRA adapter '7': reading it failed (ZeroDivisionError)"


def test_an_aborted_request_leaves_nothing_behind(library):
    library.workers.gate.clear()
    library.add(0, "7")
    library.add(1, "7")
    library.core.step()
    library.core.abort_requests([0])
    library.workers.gate.set()
    assert texts(library) == {1: text_of(7)}


def test_without_adapters_one_is_refused(tmp_path):
    library = Library(tmp_path, serves=False)
    library.add(0, "7")
    _, ends = drain(library.core)
    assert ends[0].message.startswith("LoRA is not enabled: ")
    assert library.core.list_loras() == []
    with pytest.raises(RequestError, match="LoRA is not enabled"):
        library.core.add_lora("a", 1, "/a")


# what a folder has


def test_other_contents_in_the_same_folder_are_another_adapter(library):
    """Neither the weights nor cached blocks of the old ones are used, without any call."""
    library.add(0, "7")
    assert texts(library) == {0: text_of(7)}
    library.write("7", 70)
    library.add(1, "7")
    library.add(2, "7")
    assert texts(library) == {1: text_of(70), 2: text_of(70)}
    library.write("7", 7)
    library.add(3, "7")
    assert texts(library) == {3: text_of(7)}


def test_times_that_cannot_be_trusted_are_not(library):
    """The file is overwritten so soon that neither its size nor its time need differ."""
    for number in range(20, 40):
        library.write("hot", number, is_old=False)
        library.add(number, "hot")
        assert texts(library) == {number: text_of(number)}


def test_one_id_for_two_folders_and_two_ids_for_one(library):
    library.add(0, "7", adapter_id=5)
    library.add(1, "8", adapter_id=5)
    library.add(2, "8", adapter_id=6)
    found = texts(library)
    assert found == {0: text_of(7), 1: text_of(8), 2: text_of(8)}


def test_equal_contents_share_weights_and_blocks(library):
    library.write("copy of 7", 7)
    library.add(0, "7")
    texts(library)
    library.add(1, "copy of 7")
    started = []
    while library.core.has_work:
        started += library.core.step().started
    assert [(start.num_cached_tokens, start.adapter) for start in started] == [(4, 7)]


def test_a_folder_that_has_gone_is_served_as_long_as_it_is_in_memory(library):
    library.add(0, "7")
    texts(library)
    (library.path / "7" / CONFIG).unlink()
    library.add(1, "7")
    assert texts(library) == {1: text_of(7)}
    library.add(2, "8")
    library.add(3, "9")
    texts(library)
    library.add(4, "7")
    _, ends = drain(library.core)
    assert "there is no adapter in" in ends[4].message


def test_a_request_that_has_begun_never_goes_on_with_other_weights(library):
    begun = text_of(7)[:3]
    library.add(0, "7", number=7, output=begun)
    library.add(1, "8", adapter_id=2, number=7, output=begun)
    tokens, ends = drain(library.core)
    assert tokens == {0: text_of(7)[3:]}
    text = "the LoRA adapter '8': its files have changed since the request began"
    assert ends[1].message == text


def test_requests_that_wait_take_what_the_folder_has_when_their_turn_comes(tmp_path):
    library = Library(tmp_path, slots=1, passes=100)
    for number in (7, 8):
        library.write(str(number), number)
    library.load("8", 2)
    library.load("7", 1)
    library.add(0, "7")
    library.core.step()
    library.add(1, "8", adapter_id=2)
    library.core.step()
    assert 8 not in library.workers.kept, "there is room for one"
    library.write("8", 80)
    assert texts(library)[1] == text_of(80)


def test_a_pin_follows_its_folder_to_other_contents(tmp_path):
    """With every slot pinned, the pinned folder's new contents have one, and the old ones none."""
    library = Library(tmp_path, slots=1, most_kept=2)
    library.write("a", 7)
    library.load("a", 1)
    library.core.pin_lora(1)
    library.add(0, "a")
    assert texts(library) == {0: text_of(7)}
    library.write("a", 70)
    library.add(1, "a")
    library.add(2, "a")
    assert texts(library) == {1: text_of(70), 2: text_of(70)}
    assert library.core.scheduler.adapters.pinned == {70}
    library.write("b", 8)
    library.add(3, "b", adapter_id=2)
    assert "pinned for others" in drain(library.core)[1][3].message
    assert library.core.remove_lora(1)
    library.add(4, "b", adapter_id=2)
    assert texts(library) == {4: text_of(8)}


def test_a_pin_is_of_the_folder_that_had_the_id_then(tmp_path):
    library = Library(tmp_path, slots=2)
    for name, number in (("a", 7), ("b", 8)):
        library.write(name, number)
    library.load("a", 1)
    library.core.pin_lora(1)
    library.add(0, "b", adapter_id=1)
    texts(library)
    assert library.core.scheduler.adapters.pinned == {7}


def test_pins_of_twins_that_part_have_no_more_slots_than_there_are(tmp_path):
    library = Library(tmp_path, slots=1, most_kept=2)
    for name, adapter_id in (("a", 1), ("b", 2)):
        library.write(name, 7)
        library.load(name, adapter_id)
        library.core.pin_lora(adapter_id)
    library.write("b", 70)
    library.add(0, "a", adapter_id=1)
    library.add(1, "b", adapter_id=2)
    tokens, ends = drain(library.core)
    assert tokens == {0: text_of(7)}
    assert "all 1 slots (max_loras) are pinned for others" in ends[1].message
    assert library.core.scheduler.adapters.pinned == {7}
    assert library.core.remove_lora(1)
    library.add(2, "b", adapter_id=2)
    assert texts(library) == {2: text_of(70)}


# folders that once had the same contents


@pytest.fixture
def twins(tmp_path):
    """Folders "a" and "b" of equal contents, which were read (a last) and have left the memory."""
    made = Library(tmp_path, slots=1, passes=100)
    for name, number in (("a", 7), ("b", 7), ("other", 8)):
        made.write(name, number, is_old=name == "other")
    for name, adapter_id in (("b", 2), ("a", 1), ("other", 3)):
        made.load(name, adapter_id)
    assert made.workers.kept == {8}
    yield made
    made.core.shutdown()


def test_a_folder_that_changes_changes_nothing_for_its_twin(twins):
    twins.write("a", 70)
    twins.add(0, "b", adapter_id=2)
    twins.add(1, "a", adapter_id=1)
    assert texts(twins) == {0: text_of(7), 1: text_of(70)}


@pytest.mark.parametrize("change", ["is deleted", "is broken"])
def test_a_folder_without_an_adapter_costs_its_twin_nothing(twins, change):
    if change == "is deleted":
        (twins.path / "a" / CONFIG).unlink()
    else:
        twins.write("a", "no number")
    for handle, name in enumerate("abab"):
        twins.add(handle, name, adapter_id=1 + handle % 2)
    tokens, ends = drain(twins.core)
    assert tokens == {1: text_of(7), 3: text_of(7)}
    for handle in (0, 2):
        assert ends[handle].reason is FinishReason.ERROR
        assert ends[handle].message.startswith("the LoRA adapter 'a': ")


@pytest.mark.parametrize("first", ["a", "b"])
def test_twins_that_wait_together_take_what_their_own_folder_has(twins, first):
    """Both wait for a slot with the same weights when one folder changes. Its requests came before:
    they get what was there then or what is there now.
    """
    twins.add(0, "other", adapter_id=3, max_tokens=30)
    while not twins.core.step().token_ids:
        pass
    second = "b" if first == "a" else "a"
    for handle, name in ((1, first), (2, second), (3, first)):
        twins.add(handle, name, adapter_id=1 if name == "a" else 2)
    twins.core.step()
    assert twins.workers.kept == {8}, "nothing is read before there is a slot"
    twins.write("a", 70)
    found = texts(twins)
    for handle, name in ((1, first), (2, second), (3, first)):
        allowed = [text_of(7)] if name == "b" else [text_of(7), text_of(70)]
        assert found[handle] in allowed, f"request {handle} for {name}"


def test_an_adapter_that_nobody_waits_for_any_more_is_not_read(twins):
    twins.add(0, "other", adapter_id=3)
    while not twins.core.step().token_ids:
        pass
    twins.core.scheduler.adapters.wanted[7] = None  # of a request that was aborted since
    twins.core.sleep(0)
    num_read = twins.workers.num_read
    twins.core.step()
    assert twins.workers.num_read == num_read


def test_a_request_that_has_begun_ends_by_its_own_folder_alone(twins):
    begun = text_of(7)[:3]
    twins.write("a", 70)
    twins.add(0, "a", adapter_id=1, number=7, output=begun)
    twins.add(1, "b", adapter_id=2, number=7, output=begun)
    tokens, ends = drain(twins.core)
    assert tokens == {1: text_of(7)[3:]}
    text = "the LoRA adapter 'a': its files have changed since the request began"
    assert ends[0].message == text


# memory


def test_host_memory_is_bounded(tmp_path):
    library = Library(tmp_path, slots=2, most_kept=3)
    for number in range(1, 31):
        library.write(str(number), number, is_old=number == 30)
    pick = random.Random(4)
    wanted = {handle: pick.randrange(1, 31) for handle in range(150)}
    for handle, number in wanted.items():
        library.add(handle, str(number), adapter_id=number, max_tokens=1 + handle % 10)
    found = texts(library)
    assert all(found[h] == text_of(n, 1 + h % 10) for h, n in wanted.items())
    assert library.workers.most <= 3 + 2, "two more while they are read"


def test_the_one_used_longest_ago_makes_room(tmp_path):
    library = Library(tmp_path, slots=1, most_kept=2)
    for number in (7, 8, 9):
        library.write(str(number), number, is_old=number == 9)
    assert library.load("7", 1) and library.load("8", 2)
    assert library.load("7", 1), "which uses it"
    library.load("9", 3)
    assert library.core.list_loras() == [1, 3] and library.workers.kept == {7, 9}


def test_verbs(library):
    core = library.core
    assert core.list_loras() == [] and not core.remove_lora(1)
    with pytest.raises(RequestError, match=r"lora_id=1 is not allowed: no adapter with this id"):
        core.pin_lora(1)
    assert library.load("7", 1) and library.load("7", 1) and library.load("8", 2)
    assert core.list_loras() == [1, 2]
    assert core.pin_lora(1)
    library.load("9", 3)
    assert core.list_loras() == [1, 3], "a pinned one is not dropped"
    assert core.remove_lora(3) and core.list_loras() == [1] and library.workers.kept == {7}
    assert core.remove_lora(1) and not core.remove_lora(1) and library.workers.kept == set()
    with pytest.raises(RequestError, match="there is no adapter in"):
        library.load("gone", 4)
    assert core.list_loras() == []


def test_checking_reads_nothing_and_repeats_nothing(library):
    core, workers = library.core, library.workers
    core.check_lora(str(library.path / "7"))
    with pytest.raises(RequestError, match="there is no adapter in"):
        core.check_lora(str(library.path / "gone"))
    assert workers.num_read == 0 and workers.num_checked == 2 and core.list_loras() == []
    library.load("9")
    core.check_lora(str(library.path / "9"))
    assert workers.num_checked == 2
    library.write("9", 90)
    core.check_lora(str(library.path / "9"))
    assert workers.num_checked == 3


def test_reading_again(library):
    library.load("7")
    num_read = library.workers.num_read
    library.load("7")
    assert library.workers.num_read == num_read
    library.load("7", again=True)
    assert library.workers.num_read == num_read + 1 and library.workers.kept == {7}


def test_removing_an_adapter_leaves_its_requests_alone(library):
    library.add(0, "7")
    for _ in range(100):
        if library.core.step().token_ids:
            break
    assert library.core.remove_lora(1)
    assert len(drain(library.core)[0][0]) == 9
    library.add(1, "7")
    assert texts(library) == {1: text_of(7)}


def test_requests_that_pins_leave_no_slot_end_with_a_reason(library):
    for name, adapter_id in (("7", 1), ("8", 2)):
        library.load(name, adapter_id)
    library.core.pin_lora(1)
    library.add(0, "9", adapter_id=3)
    library.core.step()
    library.core.pin_lora(2)
    library.add(1, "9", adapter_id=3)
    library.add(2, "8", adapter_id=2)
    tokens, ends = drain(library.core)
    assert tokens.keys() - {0} == {2} and tokens[2] == text_of(8)
    assert "all 2 slots (max_loras) are pinned for others" in ends[1].message
    with pytest.raises(RequestError, match=r"all 2 adapters in memory \(max_cpu_loras\) are"):
        library.load("9", 3)


def test_a_pin_that_follows_its_load_waits_for_it(library):
    """As when a restarted core is told both at once."""
    answer = library.core.add_lora("7", 1, str(library.path / "7"))
    assert library.core.pin_lora(1)
    assert library.call(answer)
    assert library.core.scheduler.adapters.pinned == {7}


def test_slots_are_filled_again_after_their_memory_was_released(library):
    library.add(0, "7")
    assert texts(library) == {0: text_of(7)}
    library.call(library.core._stop("abort", lambda: library.core._release(("weights",))))
    library.core.executor.runner._adapters.clear()
    library.core.wake_up()
    library.add(1, "7")
    assert texts(library) == {1: text_of(7)}


def test_names_are_reported(library):
    library.load("7", 1)
    library.load("8", 2)
    library.add(0, "7")
    library.add(1, "8", adapter_id=2)
    library.add(2, "9", adapter_id=3)
    seen = []
    while library.core.has_work:
        stats = library.core.step().stats
        seen.append((sorted(stats.running_adapters), sorted(stats.waiting_adapters)))
    assert (["7", "8"], ["9"]) in seen and seen[-1] == ([], [])


def test_adapters_that_slots_wait_for_are_read_first_and_starve_nobody():
    read = []
    reader = FolderReader(lambda folder: read.append(folder) or 1)
    for number in range(5):
        reader.load(f"new {number}")
    for number in range(20):
        reader.load(f"evicted {number}").wanted.add(number)
        reader.wait(30)
        while reader.take() is not None:
            pass
    reader.close()
    order = list(dict.fromkeys(read))
    assert order[0] == "evicted 0"
    assert [name for name in order if name.startswith("new")] == [f"new {n}" for n in range(5)]


# everything at once


@pytest.mark.parametrize("depth", [1, 2])
def test_crowds_of_adapters_while_folders_change_and_calls_come(tmp_path, depth):
    """Every request gets the text of some contents that its folder had after it came, and ends."""
    library = Library(tmp_path, slots=3, most_kept=4, depth=depth)
    pick, contents, number = random.Random(depth), {}, 100
    for name in "abcdefghij":
        number += name in "acegi"  # two folders each have the same at first
        contents[name] = [number]
        library.write(name, number, is_old=name == "j")
    asked, found, ends = {}, {}, {}
    for step in range(400):
        if pick.random() < 0.6 and step < 350:
            name = pick.choice("abcdefghij")
            asked[step] = name, len(contents[name]) - 1, pick.randrange(1, 9)
            library.add(step, name, adapter_id=ord(name), max_tokens=asked[step][2])
        if pick.random() < 0.05:
            name, number = pick.choice("abcdefghij"), number + 1
            copied = contents[pick.choice("abcdefghij")][-1] if pick.random() < 0.5 else number
            contents[name].append(copied)
            library.write(name, copied, is_old=False)
        if pick.random() < 0.1:
            library.core.remove_lora(ord(pick.choice("abcdefghij")))
        out = library.core.step()
        for handle, token in zip(out.handles, out.token_ids, strict=True):
            found.setdefault(handle, []).append(token)
        ends.update((end.handle, end) for end in out.finished)
    more, last = drain(library.core)
    for handle, tokens in more.items():
        found.setdefault(handle, []).extend(tokens)
    ends.update(last)
    assert ends.keys() == asked.keys()
    for handle, (name, since, length) in asked.items():
        assert ends[handle].reason is FinishReason.LENGTH, ends[handle].message
        assert found[handle] in [text_of(n, length) for n in contents[name][since:]]


def test_adapters_that_share_their_contents_are_forgotten_one_by_one(tmp_path):
    library = Library(tmp_path, slots=3)
    library.write("a", 7)
    for adapter_id in (1, 2, 3, 4):
        library.load("a", adapter_id)
    assert library.core.list_loras() == [2, 3, 4]
    library.core.pin_lora(2)
    library.load("a", 5)
    assert library.core.list_loras() == [2, 4, 5]
    library.load("a", 4)
    library.load("a", 6)
    assert library.core.list_loras() == [2, 4, 6]
    assert library.workers.num_read == 1
