import threading
import time

from nanoflow_jax.runtime.kv_store.faults import Fault, FaultLog
from nanoflow_jax.runtime.kv_store.stats import Rate
from nanoflow_jax.runtime.kv_store.workers import Workers
from tests.runtime.kv_store.helpers import Gate


def test_a_bounded_queue_in_order():
    gate, ran = Gate(), []
    workers = Workers("test", 1, max_waiting=5, faults=FaultLog())
    assert workers.submit(gate, weight=2)
    assert gate.entered.wait(5.0)
    assert workers.submit(lambda: ran.append(1), weight=3)
    assert not workers.submit(lambda: ran.append(2), weight=1)
    assert workers.submit(lambda: ran.append(3), weight=9, follow_up=True)
    assert workers.waiting == 14 and not workers.drain(0.01) and workers.longest_running_s() > 0
    gate.open()
    assert workers.drain(5.0) and ran == [1, 3] and workers.longest_running_s() == 0.0
    assert workers.submit(lambda: ran.append(4), weight=100), "alone, a call may be larger than the queue"
    assert workers.stop(5.0) and ran == [1, 3, 4]
    assert not workers.submit(lambda: ran.append(5))


def test_whoever_drains_takes_no_workers_wake_up():
    workers = Workers("test", 2, max_waiting=10, faults=FaultLog())
    gate = Gate()
    workers.submit(gate)
    assert gate.entered.wait(5.0)
    drains = [threading.Thread(target=workers.drain, args=(20.0,)) for _ in range(4)]
    for thread in drains:
        thread.start()
    for _ in range(200):
        ran = threading.Event()
        workers.submit(ran.set)
        assert ran.wait(5.0)
    gate.open()
    for thread in drains:
        thread.join(5.0)
    assert workers.stop(5.0)


def test_a_call_that_raises_is_counted_and_harms_no_other(caplog):
    faults, ran = FaultLog(), threading.Event()
    workers = Workers("test", 1, max_waiting=10, faults=faults)
    for _ in range(2):
        workers.submit(lambda: 1 / 0)  # pyright: ignore
    workers.submit(ran.set)
    assert ran.wait(5.0) and workers.stop(5.0)
    assert faults.snapshot() == {Fault.INTERNAL: 2} and len(caplog.records) == 1
    assert "ZeroDivisionError" in caplog.text, "with its traceback"


def test_a_rate_follows_recent_transfers_and_is_forgotten():
    rate = Rate(memory_s=0.2)
    assert rate.bytes_per_s() is None
    rate.add(1000, 1.0)
    assert rate.bytes_per_s() == 1000
    for _ in range(30):
        rate.add(1000, 10.0)
    recent = rate.bytes_per_s()
    assert recent is not None and 100 <= recent < 101
    rate.add(0, 100.0)
    assert (rate.bytes_per_s() or 0) < 60
    time.sleep(0.25)
    assert rate.bytes_per_s() is None
