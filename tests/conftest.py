"""What all tests share: no network, one torch thread, a fixed hypothesis profile, and a micro encoder."""

import atexit
import os
import shutil
import tempfile

_CACHE = tempfile.mkdtemp(prefix="mpp-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
# Before anything imports datasets or huggingface_hub, which read these once.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_CACHE": _CACHE,
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from mpp import Encoder  # noqa: E402

settings.register_profile(
    "mpp",
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("mpp")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Sums in one fixed order, and no fight over the cores."""
    torch.set_num_threads(1)


@pytest.fixture
def encoder() -> Encoder:
    """32 x 32 pixels, 64 patches of 4 x 4, two layers."""
    torch.manual_seed(0)
    return Encoder("vit_micro_patch4_32", depth=2)
