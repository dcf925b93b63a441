"""Prices of the machine at hand: a probe that is made once, and whose speeds an op is priced by."""

import json
import time

import pytest
import torch

from remat import RematError, checkpoint_policy, remat
from remat.plan import Roofline, measuring
from tests.helpers import Watched
from tests.plan.inside import (
    DEVICES,
    Measured,
    _table,
    best_seconds,
    processors,
    rate_at,
    record,
    speeds,
    speeds_of,
)

F = torch.nn.functional
# Seconds that the pretended probe takes for so much work: matmuls are slow, exponentials slower than copies.
PRETENDED = {"matmul": 1e9, "attention": 5e8, "copy": 1e10, "clone": 1e10, "math": 1e9, "norm": 4e9}
PRETENDED |= {"tanh": 3e8, "attention backward": 2e8}
PRETENDED |= {"narrow attention": 3e8, "narrow attention backward": 1e8}
# Seconds of an op in a step, whatever it computes.
STEP = 4e-6


@pytest.fixture
def probed(tmp_path, monkeypatch):
    """A machine of these speeds, and what was probed of it in which order."""
    asked = []

    def probes(kind, dtype, device):
        asked.append((kind, dtype, device))
        return iter([(1e6, 1e6, lambda: 1e6 / PRETENDED[kind])])

    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    monkeypatch.setattr(speeds, "probes", probes)
    monkeypatch.setattr(speeds, "seconds_apart", lambda make, size, device: make())
    monkeypatch.setattr(speeds, "best_seconds", lambda run, device: 1e-6)
    monkeypatch.setattr(speeds, "time_blocks", lambda device: [STEP, 5e-5, 2e-5])
    with measuring():
        yield asked


def ops(fn, *args):
    joint = record(fn, args)
    return joint, {op.name: op for op in joint.forward}


def attained(kind):
    """What is left of a pretended speed once the call is taken off the time."""
    return 1e6 / (1e6 / PRETENDED[kind] - 1e-6)


def test_an_op_costs_a_call_and_its_work_at_the_speed_of_its_kind(probed):
    joint, found = ops(lambda x: F.gelu(x @ x) + x, torch.empty(64, 64, requires_grad=True))
    price = {name: Roofline().price(joint, op) for name, op in found.items()}
    size = 64 * 64 * 4
    assert price["aten.mm.default"] == pytest.approx(STEP + 2 * 64**3 / attained("matmul"))
    assert price["aten.gelu.default"] == pytest.approx(STEP + 2 * size / attained("math"))
    assert price["aten.add.Tensor"] == pytest.approx(STEP + 3 * size / attained("copy"))


def test_nothing_is_measured_unless_asked(tmp_path, monkeypatch, told):
    """A processor that nobody probed has the prices of the nearest one, which is said once."""
    small = processors.Processor("Small", 1, 2.0, 128)
    large = processors.Processor("Large", 64, 3.0, 512)
    rows = {row: {"call": k * 1e-6, "in a step": [k * 1e-6, 0.0, 0.0]} for k, row in ((1, small), (2, large))}
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    monkeypatch.setattr(processors, "PROBED", rows)
    monkeypatch.setattr(speeds, "best_seconds", lambda run, device: pytest.fail("timed"))
    here = processors.Processor("Other", 1, 2.4, 256)
    monkeypatch.setattr(processors, "at_hand", lambda: here)
    for mine, call in ((here, 1e-6), (here._replace(threads=32), 2e-6), (large, 2e-6)):
        monkeypatch.setattr(torch, "get_num_threads", lambda mine=mine: mine.threads)
        monkeypatch.setattr(processors, "at_hand", lambda mine=mine: mine)
        processors.nearest.cache_clear()
        told.clear()
        assert [speeds_of("cpu").call() for _ in range(2)] == [call, call]
        assert len(told) == (mine is not large)
        assert all(mine.name in line and "remat env --measure" in line for line in told)
    processors.nearest.cache_clear()
    assert not list(tmp_path.iterdir())


def test_every_row_of_processors_has_every_price():
    names = {
        f"{kind} {dtype}"
        for kind in (*speeds.HEAVY, *speeds.NARROWED, "linalg", *speeds.LIGHT)
        for dtype in ("float32", "bfloat16", "float16", "float64")
    }
    for table in processors.PROBED.values():
        assert set(table) == names | {"call", "in a step"}
        assert all(rate > 0 for name in names for _, rate in table[name])


def test_a_card_is_the_one_of_its_name(monkeypatch, told):
    for name, key in (("NVIDIA H200", "h200"), ("AMD Instinct MI300X", "mi300x"), ("Tesla K80", "h100")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert processors.card_like("cuda") == key
    assert ["Tesla K80" in line for line in told] == [True]


def test_what_takes_longer_than_an_exponential_has_a_speed_of_its_own(probed):
    def fn(x):
        return F.gelu(F.gelu(x.tanh(), approximate="tanh")) ** 2.5 * x.square() ** 2

    joint, found = ops(fn, torch.empty(64, 64, requires_grad=True))
    cost = [Roofline().price(joint, op) for op in joint.forward]
    slow, fast, copied = [STEP + 2 * 64 * 64 * 4 / attained(kind) for kind in ("tanh", "math", "copy")]
    # tanh, gelu by tanh, gelu, a power; then squares, which are products.
    assert cost[:6] == pytest.approx([slow, slow, fast, slow, copied, copied])


def test_one_thread_is_timed_by_the_processors_clock(monkeypatch):
    """Others have the processor meanwhile: no time of the op's."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert best_seconds(lambda: time.sleep(0.004), "cpu") < 0.002


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_threads_that_wait_for_each_other_take_no_longer_than_one(two_threads):
    """On a busy machine 2 MiB were copied at 0.2 GB/s, twenty times as slowly as by one thread."""
    assert best_seconds(lambda: time.sleep(0.004 * (torch.get_num_threads() - 1)), "cpu") < 0.002


def test_compiled_chains_move_their_ends_and_compute_what_they_compute(probed):
    joint, found = ops(lambda x: (F.gelu(x @ x) + 1) @ x, torch.empty(64, 64, requires_grad=True))
    price = {name: Roofline(None, fused=True).price(joint, op) for name, op in found.items()}
    size = 64 * 64 * 4
    computed = 2 * size / attained("math") - 2 * size / attained("copy")
    assert price["aten.gelu.default"] == pytest.approx(size / attained("copy") + computed)
    # The chain is one launch, of the op whose result leaves it.
    assert price["aten.add.Tensor"] == pytest.approx(1e-6 + size / attained("copy"))


def test_tensors_without_data_have_the_prices_of_an_h100(probed):
    x = torch.empty(64, 64, device="meta", requires_grad=True)
    joint, found = ops(lambda x: (x @ x).sin(), x)
    moved = 2 * 64 * 64 * 4
    assert Roofline().price(joint, found["aten.sin.default"]) == moved / DEVICES["h100"].bandwidth
    assert Roofline("a100").price(joint, found["aten.sin.default"]) == moved / DEVICES["a100"].bandwidth
    assert probed == []
    assert Roofline("cpu").price(joint, found["aten.mm.default"]) > 1e-6 and len(probed) == 2


def test_a_probe_is_made_once_and_kept_on_disk(probed, tmp_path):
    joint, found = ops(lambda x: x @ x, torch.empty(8, 8, requires_grad=True))
    first = Roofline().price(joint, found["aten.mm.default"])
    (path,) = tmp_path.iterdir()
    assert set(json.loads(path.read_text())) == {"call", "in a step", "matmul float32", "copy float32"}
    count = len(probed)
    speeds._speeds.cache_clear()
    assert Roofline().price(joint, found["aten.mm.default"]) == first and len(probed) == count


def test_processes_that_probe_at_once_price_alike(probed):
    """The first that wrote a speed is believed by those that come later."""
    mine = speeds_of("cpu")
    mine.curve("copy", torch.float32)
    table = json.loads(mine.path.read_text()) | {"matmul float32": [[1.0, 7.0]]}
    mine.path.write_text(json.dumps(table))
    assert mine.curve("matmul", torch.float32) == ((1.0, 7.0),)


def test_a_file_that_is_none_is_probed_anew(probed, tmp_path):
    path = speeds_of("cpu").path
    path.write_text("[half a fi")
    speeds._speeds.cache_clear()
    assert speeds_of("cpu").call() == 1e-6


def test_speeds_between_and_beyond_the_points_of_a_curve():
    curve = ((1e2, 10.0), (1e4, 1000.0))
    assert [rate_at(curve, work) for work in (1.0, 1e2, 1e4, 1e9)] == [10.0, 10.0, 1000.0, 1000.0]
    assert rate_at(curve, 1e3) == pytest.approx(100.0)


def test_a_matmul_that_is_dear_here_is_kept(probed):
    """An h100 rather runs the product again than the sine, a slow processor the other way round."""

    def fn(x, w):
        return ((x @ w).sin() * 2).cos()

    x, w = torch.ones(32, 32, requires_grad=True), torch.nn.Parameter(torch.ones(32, 32))
    again = {}
    for device in (None, "h100"):
        plan = checkpoint_policy(budget=2 * 4096, device=device).plan(fn, x, w)
        again[device] = plan.recomputed_flops
    assert again[None] == 0
    remat(fn, policy=checkpoint_policy(budget=2 * 4096))(x, w).sum().backward()


@pytest.mark.slow
def test_probes_of_every_kind_run(monkeypatch, tmp_path):
    """The probe itself, with no time to it, in and out of other people's modes."""
    ran = []
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    monkeypatch.setattr(speeds, "best_seconds", lambda run, device: ran.append(run()) or 1e-3)
    before = torch.get_rng_state()
    with measuring(), torch.device("meta"), torch.autocast("cpu"):
        found = torch.func.vmap(lambda x: x * speeds_of("cpu").call())(torch.ones(2, device="cpu"))
        attained = speeds_of("cpu").attained(torch.float32)
    assert found.shape == (2,) and all(rate > 0 for rate in attained.values())
    made = [t for some in ran[1:] for one in some for t in (one if isinstance(one, tuple) else (one,))]
    assert {(t.device.type, t.dtype) for t in (ran[0], *made)} == {("cpu", torch.float32)}
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", ["copy", "clone", "math", "tanh"])
def test_a_probe_moves_the_bytes_that_it_counts(kind):
    """A sum of a tensor with itself reads one operand, and was counted as three."""

    def look(op, args, kwargs, out):
        storages = {t.untyped_storage() for t in (*args, out) if isinstance(t, torch.Tensor)}
        moved.append(sum(s.nbytes() for s in storages))

    for probe in list(speeds.probes(kind, torch.float32, "cpu"))[:2]:
        run, moved = probe.make(), []
        with Watched(look):
            run()
        assert moved == [probe.bytes]


def test_a_region_costs_something_once_and_something_for_each_op(probed):
    assert speeds_of("cpu").region(10) == pytest.approx(5e-5 + 10 * 2e-5)
    assert speeds_of("cpu").op() == STEP


@pytest.mark.parametrize(("dim", "narrow"), [(16, "narrow "), (64, "")])
def test_attention_has_speeds_by_pass_and_by_the_width_of_heads(probed, dim, narrow):
    q = torch.empty(1, 2, 8, dim, requires_grad=True)
    joint = record(lambda q: F.scaled_dot_product_attention(q, q, q), (q,))
    price = {op.name.split(".")[1]: Roofline().price(joint, op) for op in joint.ops}
    flops, name = 2 * 8 * 8 * dim, "_scaled_dot_product_flash_attention_for_cpu"
    assert price[name] == pytest.approx(STEP + 4 * flops / attained(f"{narrow}attention"))
    back = price[f"{name}_backward"] - STEP
    assert back == pytest.approx(10 * flops / attained(f"{narrow}attention backward"))


def test_a_causal_mask_spares_blocks_of_keys(probed):
    def prices(rows, causal):
        q = torch.empty(1, 1, rows, 64, requires_grad=True)
        joint = record(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=causal), (q,))
        return [Roofline().price(joint, op) - STEP for op in joint.ops if "attention" in op.name]

    for rows, share in ((256, 1.0), (1024, 0.75), (2048, 0.625)):
        expected = [share * seconds for seconds in prices(rows, False)]
        assert len(expected) == 2 and prices(rows, True) == pytest.approx(expected)


def test_timing_an_op_draws_nothing_from_the_users_generator(monkeypatch, tmp_path):
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))
    _table.cache_clear()
    joint, found = ops(lambda x: F.dropout(x * 2), torch.ones(8, 8, requires_grad=True))
    before = torch.get_rng_state()
    assert all(Measured().price(joint, op) >= 0 for op in found.values())
    assert torch.equal(before, torch.get_rng_state())
    _table.cache_clear()


def test_ops_on_no_device_cannot_be_timed():
    x = torch.empty(4, 4, device="meta", requires_grad=True)
    with pytest.raises(RematError, match='say on which device, as device="cpu"'):
        checkpoint_policy(budget=0.5, cost="measured").plan(lambda x: (x @ x).sin(), x)


def test_kernels_of_a_card_are_not_asked_for_the_prices_of_the_cpu():
    """A plan can be made while a step is traced for a GPU: what is timed has numbers, and runs here."""
    from tests.plan.inside import attention_of_gpus

    q, k, v = torch.randn(3, 1, 2, 16, 8, dtype=torch.bfloat16).unbind(0)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    with attention_of_gpus((9, 0)):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), expected)


def test_what_cannot_be_timed_is_an_error(monkeypatch, tmp_path):
    """It was an endless recursion: a dtype without a kernel is priced as float32, and so was float32."""
    monkeypatch.setenv("REMAT_CACHE", str(tmp_path))

    def fails(*_):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(speeds, "seconds_apart", fails)
    with measuring(), pytest.raises(RematError, match="matmul of float32 cannot run"):
        speeds.Speeds("cpu").curve("matmul", torch.bfloat16)
