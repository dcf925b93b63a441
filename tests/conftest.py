"""Before every test nothing is learnt of any region; after it, whatever it did, torch is as it was."""

import atexit
import gc
import os
import shutil
import tempfile
from collections import Counter

import pytest
import torch

from remat._core import DEVICES
from remat.plan.graph.disk import table_path, write_table
from remat.plan.graph.speeds import HEAVY, LIGHT, NARROWED
from remat.transforms.compat.autograd import hooks_disabled, in_transform, top_hooks
from tests.helpers import forget, seed_only_what_is_there


def pretend_speeds():
    """Have this machine's prices be those of an h100, in subprocesses too: no probe, no plan that varies."""
    folder = os.environ["REMAT_CACHE"] = tempfile.mkdtemp(prefix="remat-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    known = DEVICES["h100"]
    attained = {
        "float32": known.single,
        "float64": known.single,
        "bfloat16": known.half,
        "float16": known.half,
    }
    table = {"call": 0.0, "in a step": [0.0, 0.0, 0.0]}
    for dtype, rate in attained.items():
        table |= {f"{kind} {dtype}": [[1.0, rate]] for kind in (*HEAVY, *NARROWED)}
        table |= {f"{kind} {dtype}": [[1.0, known.bandwidth]] for kind in LIGHT}
    threads = torch.get_num_threads()
    for count in range(1, 1 + max(threads, 4)):
        torch.set_num_threads(count)
        write_table(table_path("rates", "cpu"), table)
    torch.set_num_threads(threads)


pretend_speeds()
seed_only_what_is_there()


def pytest_addoption(parser):
    parser.addoption("--rooms", action="store_true", help="at the end, the seconds of tests by room")


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--rooms"):
        seconds, tests = Counter(), Counter()
        for report in [r for reports in terminalreporter.stats.values() for r in reports]:
            if hasattr(report, "duration"):
                room = "/".join(report.nodeid.partition("::")[0].split("/")[:2])
                seconds[room] += report.duration
                tests[room] += report.when == "call"
        terminalreporter.section("seconds by room")
        for room, taken in seconds.most_common():
            terminalreporter.write_line(f"{taken:8.1f} s  {tests[room]:6,} tests  {room}")


def ambient():
    return {
        "functorch level": in_transform(),
        "saved-tensor hooks refused": hooks_disabled(),
        "saved-tensor hooks": top_hooks(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "forward-mode level": torch.autograd.forward_ad._current_level,
        "default dtype": torch.get_default_dtype(),
    }


CLEAN = ambient()


# Dynamo empties the processor's caches after every compilation, to time its guards: 28 ms for a log line.
torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]


# At its own pace Python searches all of torch again and again. Tests of memory collect for themselves.
gc.set_threshold(100_000, 20, 100)


@pytest.fixture(autouse=True, scope="module")
def few_objects_to_collect():
    """What earlier modules left behind is not searched again by every collection that a test asks for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_leaks():
    forget()
    yield
    assert ambient() == CLEAN
