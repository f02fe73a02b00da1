"""The watchdog: when it barks, what it says, and that it looks after a blocked event loop."""

import asyncio
import logging
import re
import threading

from quire.observability.watchdog import LoopWatch, Watchdog, thread_stacks


def test_it_barks_at_the_limit_and_at_each_doubling():
    watchdog = Watchdog("the loop", 2.0)
    ages = [0.0, 1.9, 2.0, 3.0, 3.9, 4.1, 5.0, 8.3, 0.0, 1.0, 2.5, 3.0]
    barked = [age for age in ages if watchdog.look(age)]
    assert barked == [2.0, 4.1, 8.3, 2.5]


def test_the_stacks_are_those_of_every_thread():
    inside, leave = threading.Event(), threading.Event()

    def stand_in_the_way():
        inside.set()
        leave.wait(30)

    thread = threading.Thread(target=stand_in_the_way, name="the slow one")
    thread.start()
    assert inside.wait(30)
    text = thread_stacks()
    leave.set()
    thread.join()
    assert "Thread the slow one (" in text and "in stand_in_the_way" in text
    assert "in test_the_stacks_are_those_of_every_thread" in text


class Released(logging.Handler):
    """Lets the loop go on when the first report is there."""

    def __init__(self):
        super().__init__()
        self.texts = []
        self.event = threading.Event()

    def emit(self, record):
        self.texts.append(record.getMessage())
        self.event.set()


def test_a_blocked_event_loop_is_reported_while_it_is_blocked():
    heard = Released()
    logger = logging.getLogger("quire.observability.watchdog")
    logger.addHandler(heard)

    def block_the_loop():
        assert heard.event.wait(30), "nobody looked"

    async def use():
        watch = LoopWatch(Watchdog("The loop of the test", 0.05), period_s=0.01)
        watch.start()
        await asyncio.sleep(0)
        block_the_loop()
        watch.close()

    try:
        asyncio.run(use())
    finally:
        logger.removeHandler(heard)
    assert re.match(r"The loop of the test has been stuck for \d+\.\d+ s", heard.texts[0])
    assert "in block_the_loop" in heard.texts[0]


def test_a_loop_that_is_closed_is_left_alone():
    watch = LoopWatch(Watchdog("The loop", 1e-3), period_s=0.01)

    async def use():
        watch.start()

    asyncio.run(use())
    watch._watch()  # returns: there is no loop any more
