import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DVC_NO_ANALYTICS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # several test processes share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Where several processes share the tests, one runs those of a file, and one all that use `clone`, in the usual order: they
    build on what the ones before them left there."""
    for item in items:
        item.add_marker(
            pytest.mark.xdist_group("clone" if "clone" in item.fixturenames else item.nodeid.split("::")[0])
        )


@pytest.fixture(scope="session")
def clone(tmp_path_factory) -> Path:
    """A copy of the project in which `make repro ARGS=experiment=smoke` has run once."""
    from clone import checked, copy_project

    folder = tmp_path_factory.mktemp("clone")
    copy_project(folder)
    checked(["make", "-o", ".venv/.installed", "repro", "ARGS=experiment=smoke"], folder)
    return folder
