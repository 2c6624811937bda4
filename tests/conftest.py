import signal
import warnings

import pytest
import torch

# an output that a kernel forgets to write must not pass by luck: uninitialised memory reads as NaN
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
# two test processes share two cores
torch.set_num_threads(1)

# a shell starts its background jobs deaf to Ctrl-C, and so would be the processes that the tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)

warnings.filterwarnings("ignore", message="`torch.jit", category=FutureWarning)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
