"""What can go wrong in the middle of a run: signals, and too little memory."""

import signal
import threading

import pytest
import torch
from training import Setup, digits

from hgrn_vision.train.faults import OutOfMemory, StopRequest, memory_advice, smaller_micro_batch


def test_out_of_memory_names_the_micro_batch_to_try(monkeypatch):
    setup = Setup(digits(batch_size=96, micro_batch=48))

    def exhausted(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    setup.engine.task.forward = exhausted
    with pytest.raises(OutOfMemory, match="micro-batch 48: try --micro-batch 24 .*--grad-checkpointing"):
        setup.run(1)
    assert smaller_micro_batch(setup.config, ranks=4) == 24
    assert smaller_micro_batch(digits(batch_size=80, micro_batch=40), ranks=4) == 20
    assert smaller_micro_batch(digits(batch_size=4, micro_batch=2), ranks=2) is None


def test_smaller_micro_batches_are_even_and_divide_among_the_ranks():
    config = digits(batch_size=60, micro_batch=30)
    assert smaller_micro_batch(config, ranks=1) == 12
    assert smaller_micro_batch(config, ranks=2) == 10


def test_nothing_smaller_is_advised_where_nothing_is():
    for checkpointing, words in ((False, "use more devices, or --grad-checkpointing"), (True, "use more devices")):
        config = digits(batch_size=4, micro_batch=2, grad_checkpointing=checkpointing)
        with pytest.raises(OutOfMemory) as error, memory_advice(config, ranks=2):
            raise MemoryError
        assert str(error.value) == f"out of memory with micro-batch 2: {words}"


def test_errors_of_memory_and_others():
    allocator = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    for error in (torch.OutOfMemoryError("CUDA"), MemoryError(), allocator):
        with pytest.raises(OutOfMemory, match="try --micro-batch 16"), memory_advice(digits(), ranks=1):
            raise error
    other = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError) as raised, memory_advice(digits(), ranks=1):
        raise other
    assert raised.value is other


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_remembered_and_ctrl_c_after_it_is_obeyed(first):
    before = [signal.getsignal(number) for number in StopRequest.SIGNALS]
    with StopRequest() as stop:
        assert stop.name == ""
        signal.raise_signal(first)
        assert stop.name == signal.Signals(first).name
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in StopRequest.SIGNALS] == before


def test_only_the_main_thread_listens():
    handlers = []

    def elsewhere():
        with StopRequest() as stop:
            handlers.append((stop.name, signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert handlers == [("", before)]
