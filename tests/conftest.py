import random
import signal
import warnings

import numpy as np
import pytest
import torch
from browser import Browser

# an output that a kernel forgets to write must not pass by luck, so uninitialised memory reads as NaN
torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True
# two test processes share two cores
torch.set_num_threads(1)

# a shell starts its background jobs with SIGINT ignored, which the processes that the tests interrupt would inherit
signal.signal(signal.SIGINT, signal.default_int_handler)

warnings.filterwarnings("ignore", message="`torch.jit", category=FutureWarning)


def seed_everything():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


# before fixtures that several tests share, which would otherwise depend on the test that ran before them
@pytest.fixture(autouse=True, scope="module")
def fixed_seed_of_the_module():
    seed_everything()


@pytest.fixture(autouse=True)
def fixed_seed(fixed_seed_of_the_module):
    seed_everything()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
