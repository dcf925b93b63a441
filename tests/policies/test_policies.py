"""Policies by themselves: algebra, printing, verdicts, mistakes, the catalogue of ops."""

import pickle
import re
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from remat import RematError, checkpoint_policy, remat, saved_residuals, scan_remat
from remat.nn import apply_to
from remat.policies import (
    Policy,
    check_verdict,
    offload,
    register_op,
    save_all_but_names,
    save_attention,
    save_costlier_than,
    save_every_nth,
    save_everything,
    save_larger_than,
    save_matmuls,
    save_names,
    save_nothing,
    save_ops,
    save_weight_matmuls,
    where,
)
from tests.helpers import OpCounter, crossed, forget
from tests.policies.inside import Call, Decision, OpInfo, TensorMeta, _catalogue as catalogue

aten = torch.ops.aten
SAVE, OFFLOAD, RECOMPUTE = Decision.SAVE, Decision.OFFLOAD, Decision.RECOMPUTE


def info(op: Any = aten.mm.default, *args: Any, **fields: Any) -> OpInfo:
    return OpInfo(op, args, {}, (), **fields)


def meta(*shape):
    return TensorMeta.of(torch.empty(shape, device="meta"))


def rule(op_info):
    return op_info.index == 0


READY = {
    "save_nothing": save_nothing,
    "save_everything": save_everything,
    "save_matmuls": save_matmuls,
    "save_weight_matmuls": save_weight_matmuls,
    "save_attention": save_attention,
    "offload(save_matmuls)": offload(save_matmuls),
    "save_ops(aten.mm.default)": save_ops(aten.mm.default),
    "save_ops(aten.cos.default, aten.sin.default)": save_ops(aten.sin.default, aten.cos.default),
    "save_ops(higher_order.flex_attention)": save_ops(torch.ops.higher_order.flex_attention),
    "save_names('k', 'q')": save_names("q", "k"),
    "save_names('q', strict=True)": save_names("q", strict=True),
    "save_all_but_names('q')": save_all_but_names("q"),
    "offload(save_names('q'))": offload(save_names("q")),
    "checkpoint_policy(rule)": checkpoint_policy(rule),
    "where(rule)": where(rule),
    "where(rule, save_matmuls)": where(rule, save_matmuls),
    "save_every_nth(2, save_matmuls)": save_every_nth(2, save_matmuls),
    "save_every_nth(3, save_matmuls | save_names('q'))": save_every_nth(3, save_matmuls | save_names("q")),
    "save_larger_than(4096)": save_larger_than("4KiB"),
    "save_costlier_than(0.5)": save_costlier_than(0.5),
    "offload(save_weight_matmuls)": offload(save_weight_matmuls),
    "save_attention | offload(save_names('q'))": save_attention | offload(save_names("q")),
    "save_matmuls | save_names('q')": save_matmuls | save_names("q"),
    "save_matmuls | save_attention | save_names('q')": save_matmuls | save_attention | save_names("q"),
    "save_matmuls & (save_attention | ~save_names('q'))": save_matmuls & (save_attention | ~save_names("q")),
    "~(save_matmuls & save_attention)": ~(save_matmuls & save_attention),
}


@pytest.mark.parametrize("text", READY)
def test_prints_as_it_is_written(text):
    assert repr(READY[text]) == text


@pytest.mark.parametrize("text", READY)
def test_is_a_value(text):
    policy = READY[text]
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy and hash(again) == hash(policy)
    assert sum(policy == other for other in READY.values()) == 1
    with pytest.raises(AttributeError):
        policy.needs_calls = True


BUDGETS = {
    "checkpoint_policy(budget=0.4)": lambda: checkpoint_policy(budget=0.4),
    "checkpoint_policy(budget=2048)": lambda: checkpoint_policy(budget="2KiB"),
    "checkpoint_policy(peak=4096)": lambda: checkpoint_policy(peak="4KiB"),
    "checkpoint_policy(budget=0.5, peak=4096)": lambda: checkpoint_policy(budget=0.5, peak=4096),
    "checkpoint_policy(budget=0.4) | save_names('q')": lambda: checkpoint_policy(budget=0.4) | ["q"],
    "~checkpoint_policy(budget=0.4)": lambda: ~checkpoint_policy(budget=0.4),
}


@pytest.mark.parametrize("text", BUDGETS)
def test_budgets_are_values_too(text):
    policy = BUDGETS[text]()
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy == BUDGETS[text]() and hash(again) == hash(policy)
    assert repr(policy) == text
    assert sum(policy == other() for other in BUDGETS.values()) == 1


SQUARE, STACK, IMAGE = meta(2, 2), meta(2, 2, 2), meta(1, 1, 3, 3)
OPS = {
    aten.mm.default: (SQUARE, SQUARE),
    aten.bmm.default: (STACK, STACK),
    aten.sin.default: (SQUARE,),
    aten.convolution.default: (IMAGE, IMAGE, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    aten.mm.out: (SQUARE, SQUARE),
}


@pytest.mark.parametrize("text", READY)
def test_quick_agrees_with_the_full_verdict(text):
    policy = READY[text]
    for op, args in OPS.items():
        for name in (None, "q"):
            for index in (0, 1):
                op_info = OpInfo(op, args, {}, (IMAGE,), name=name, index=index)
                full = check_verdict(policy, op_info, policy(op_info))
                assert policy.decide_by_op(op) in (None, full), op


@pytest.mark.parametrize("a", Decision)
@pytest.mark.parametrize("b", Decision)
def test_algebra(a, b):
    left, right = checkpoint_policy(lambda _: a), checkpoint_policy(lambda _: b)
    assert (left | right)(info()) is max(a, b, key=lambda d: d.value)
    assert (left & right)(info()) is min(a, b, key=lambda d: d.value)
    assert (~left)(info()) is (SAVE if a is RECOMPUTE else RECOMPUTE)


def test_operators_take_what_policies_are_made_from():
    assert save_matmuls | [aten.sin.default] == save_matmuls | save_ops(aten.sin.default)
    assert ["q"] | save_matmuls == save_names("q") | save_matmuls
    assert (rule & save_matmuls)(info(index=1)) is RECOMPUTE
    assert save_matmuls.__and__(rule)(info(index=0)) is SAVE


def test_classes_of_ops():
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    for op in (
        aten.mm.default,
        aten.bmm.default,
        aten.convolution.default,
        aten.addmm.out,
        aten._int_mm.default,
    ):
        assert save_matmuls(info(op)) is SAVE and offload(save_matmuls)(info(op)) is OFFLOAD
        assert save_attention(info(op)) is RECOMPUTE
    assert save_matmuls(info(flash)) is RECOMPUTE and save_attention(info(flash)) is SAVE
    assert save_attention(info(torch.ops.higher_order.flex_attention)) is SAVE
    for policy in (save_matmuls, save_attention, offload(save_matmuls), save_weight_matmuls):
        assert policy(info(aten.sin.default)) is RECOMPUTE


def test_packet_means_all_its_overloads():
    policy = save_ops(aten.mm)
    assert all(policy(info(getattr(aten.mm, name))) is SAVE for name in aten.mm.overloads())
    assert save_ops(aten.mm.default)(info(aten.mm.out)) is RECOMPUTE


def test_names():
    assert save_names("q")(info(name="q")) is SAVE
    assert save_names("q")(info(name="k")) is RECOMPUTE and save_names("q")(info()) is RECOMPUTE
    assert save_all_but_names("q")(info(name="q")) is RECOMPUTE and save_all_but_names("q")(info()) is SAVE
    assert offload(save_names("q"))(info(name="q")) is OFFLOAD


def test_checkpoint_policy_makes_policies():
    assert checkpoint_policy(save_matmuls) is save_matmuls
    assert checkpoint_policy("q") == checkpoint_policy(["q"]) == save_names("q")
    assert checkpoint_policy([aten.mm]) == checkpoint_policy(aten.mm) == save_ops(aten.mm)
    assert checkpoint_policy(("q", aten.sin.default)) == save_names("q") | save_ops(aten.sin.default)

    @checkpoint_policy
    def first(op_info):
        return op_info.index == 0

    assert first(info(index=0)) is SAVE and first(info(index=1)) is RECOMPUTE
    assert first.needs_calls and isinstance(first, Policy)


@pytest.mark.parametrize("answer", [None, "yes", 1, 0.0, SAVE.name, torch.tensor(True), save_matmuls])
def test_wrong_answers_name_policy_op_and_value(answer):
    def bad(op_info):
        return answer

    with pytest.raises(RematError) as caught:
        checkpoint_policy(bad)(info(region="block"))
    message = str(caught.value)
    assert (
        "bad" in message and "aten.mm.default" in message and repr(answer) in message and "'block'" in message
    )


def test_wrong_answer_is_found_inside_a_combination():
    for policy in (save_nothing | checkpoint_policy(lambda _: None), ~checkpoint_policy(lambda _: None)):  # pyright: ignore
        with pytest.raises(RematError, match="answered None"):
            policy(info())


def test_torch_checkpoint_policy_is_told_apart():
    wrong = checkpoint_policy(lambda _: torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE)  # type: ignore
    with pytest.raises(RematError, match="remat.Decision"):
        wrong(info())


def test_makers_refuse_what_they_cannot_use():
    with pytest.raises(RematError, match="neither"):
        checkpoint_policy()
    with pytest.raises(RematError, match="both"):
        checkpoint_policy(save_matmuls, budget=0.5)  # pyright: ignore
    with pytest.raises(RematError, match="checkpoint_name"):
        save_names()
    with pytest.raises(RematError, match="of type int"):
        offload(save_names("q", 3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: where(save_matmuls), "combined with `&`"),  # type: ignore[arg-type]
        (lambda: where(3), "from OpInfo to bool"),  # type: ignore[arg-type]
        (lambda: save_every_nth(0, save_matmuls), "positive integer, got 0"),
        (lambda: save_every_nth(True, save_matmuls), "positive integer"),
        (lambda: save_every_nth(2, torch.mm), "policy got"),
        (lambda: save_larger_than("big"), "'512KiB'"),
        (lambda: save_larger_than(-1), "got -1"),
        (lambda: save_costlier_than("3"), "write a number"),  # type: ignore[arg-type]
        (lambda: where(lambda _: 1)(info()), "answered 1 of type int"),  # type: ignore[arg-type]
    ],
)
def test_narrowing_refuses_mistakes(make, hint):
    with pytest.raises(RematError, match=re.escape(hint)) as caught:
        make()
    assert isinstance(caught.value, TypeError)


def test_where_asks_the_policy_only_where_the_predicate_holds():
    policy = where(rule, save_matmuls | save_names("q"))
    assert policy(info(index=0)) is SAVE and policy(info(index=1)) is RECOMPUTE
    assert policy(info(aten.sin.default, index=0)) is RECOMPUTE
    assert where(rule, offload(save_matmuls))(info(index=0)) is OFFLOAD
    assert where(rule)(info(aten.sin.default, index=0)) is SAVE


def verdicts(policy, *ops):
    """What a region says of these ops in order: quickly where it can, as the engine does."""
    policy = policy.fresh()
    answers = []
    for index, op in enumerate(ops):
        quick = policy.decide_by_op(op)
        op_info = info(op, index=index)
        answers.append(check_verdict(policy, op_info, policy(op_info)) if quick is None else quick)
    return "".join(answer.name[0] for answer in answers)


MM, SIN, BMM, COS = aten.mm.default, aten.sin.default, aten.bmm.default, aten.cos.default


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (save_every_nth(1, save_matmuls), "SSRSRS"),
        (save_every_nth(2, save_matmuls), "SRRSRR"),
        (save_every_nth(3, save_matmuls), "SRRRRS"),
        (save_every_nth(2, offload(save_matmuls)), "ORRORR"),
        (save_every_nth(2, save_every_nth(2, save_matmuls)), "SRRRRR"),
        (save_every_nth(2, save_matmuls) | save_ops(SIN), "SRSSRR"),
        # Combining it does not change which values it counts.
        (save_every_nth(2, save_everything) & save_ops(MM, BMM), "SRRRRR"),
        (save_every_nth(2, save_everything) | save_ops(MM), "SSSRSS"),
        (~save_every_nth(2, save_matmuls), "RSSRSS"),
        (where(lambda info: info.index > 0, save_every_nth(2, save_matmuls)), "RSRRRS"),
    ],
)
def test_save_every_counts_what_the_policy_keeps(policy, expected):
    ops = (MM, MM, SIN, BMM, COS, MM)
    assert verdicts(policy, *ops) == expected
    # The next forward counts from the start.
    assert verdicts(policy, *ops) == expected


def test_a_value_named_after_it_was_made_counts_once():
    policy = save_every_nth(2, save_everything).fresh()
    answers = [policy(info(index=i)) for i in (0, 0, 1, 1, 2, 2)]
    assert answers == [SAVE, SAVE, RECOMPUTE, RECOMPUTE, SAVE, SAVE]


def of_size(*shape):
    return OpInfo(aten.mm.default, (meta(shape[0], 100), meta(100, shape[1])), {}, (meta(*shape),))


def test_by_size_and_by_cost():
    assert save_larger_than(63)(of_size(4, 4)) is SAVE and save_larger_than(64)(of_size(4, 4)) is RECOMPUTE
    # 2 * 100 FLOPs for every float32: 50 for a byte.
    assert (
        save_costlier_than(49.9)(of_size(4, 4)) is SAVE and save_costlier_than(50)(of_size(4, 4)) is RECOMPUTE
    )
    assert save_costlier_than(0)(OpInfo(SIN, (meta(3),), {}, (meta(3),))) is RECOMPUTE


def test_offload_keeps_elsewhere_what_the_policy_saves():
    assert offload(save_matmuls)(info()) is OFFLOAD and offload(offload(save_matmuls))(info()) is OFFLOAD
    assert offload(save_matmuls)(info(aten.sin.default)) is RECOMPUTE


def test_bind_reaches_the_parts():
    class Bound(Policy):
        def bind(self, fn, args, kwargs):
            return save_everything

    assert (Bound() | save_matmuls).bind(len, (), {}) == save_everything | save_matmuls
    assert (~Bound()).bind(len, (), {}) == ~save_everything
    policy = save_matmuls | save_attention
    assert policy.bind(len, (), {}) is policy


# -- save_weight_matmuls ---------------------------------------------------------------------------

x2, x3, w2, w3, v = meta(5, 4), meta(2, 5, 4), meta(4, 6), meta(2, 4, 6), meta(4)


@pytest.mark.parametrize(
    ("function", "args", "saved"),
    [
        (linear, (x3, meta(6, 4)), True),
        (torch.mm, (x2, w2), True),
        (torch.addmm, (meta(6), x2, w2), True),
        (torch.mv, (x2, v), True),
        (torch.matmul, (x2, w2), True),
        (torch.matmul, (x3, w2), True),
        (torch.matmul, (x3, v), True),
        (torch.matmul, (x3, w3), False),
        (torch.Tensor.matmul, (x3, w3), False),
        (torch.Tensor.__matmul__, (x3, w2), True),
        (torch.Tensor.__matmul__, (x3, w3), False),
        (torch.Tensor.__rmatmul__, (w3, x3), False),
        (torch.bmm, (x3, w3), False),
        (torch.baddbmm, (meta(6), x3, w3), False),
        (torch.addbmm, (meta(6), x3, w3), True),
        (torch.tensordot, (x3, w2, 1), True),
        (torch.inner, (x3, meta(6, 4)), True),
        (torch.outer, (v, v), True),
        (scaled_dot_product_attention, (x3, x3, x3), False),
        (torch.einsum, ("btd,df->btf", x3, w2), True),
        (torch.einsum, ("btd,dhe->bthe", x3, meta(4, 2, 3)), True),
        (torch.einsum, ("bthe,bshe->bhts", meta(2, 5, 3, 4), meta(2, 5, 3, 4)), False),
        (torch.einsum, ("b t d , b d f -> b t f", x3, w3), False),
        (torch.einsum, ("ij,jk", x2, w2), True),
        (torch.einsum, ("bij,bjk", x3, w3), True),
        (torch.einsum, ("...d,df->...f", x3, w2), True),
        (torch.einsum, ("...td,...df->...tf", x3, w3), False),
        (torch.einsum, ("...td,...df->...tf", x3, w2), True),
        (torch.einsum, ("...td,...df", x3, w3), False),
        (torch.einsum, ("bij,bjk->bik", [x3, w3]), False),
        (torch.einsum, (x3, [0, 1, 2], w3, [0, 2, 3], [0, 1, 3]), False),
        (torch.einsum, (x3, [0, 1, 2], w2, [2, 3], [0, 1, 3]), True),
        (torch.einsum, (x2, [0, 1], w2, [1, 2]), True),
        (torch.nn.functional.bilinear, (x2, x2, meta(6, 4, 4)), True),
    ],
)
@pytest.mark.parametrize("op", [aten.mm.default, aten.bmm.default])
def test_unbatched_is_judged_by_the_call(op, function, args, saved):
    """Whatever vmap made of it below: both a product of matrices and one of batches."""
    verdict = save_weight_matmuls(info(op, call=Call(function, args, {})))
    assert verdict is (SAVE if saved else RECOMPUTE)


def test_unbatched_without_a_call_judges_the_op():
    for op in (aten.mm, aten.addmm, aten.mv, aten.linear, aten.dot):
        assert save_weight_matmuls(info(op.default)) is SAVE
    for op in (aten.bmm, aten.baddbmm, aten.convolution):
        assert save_weight_matmuls(info(op.default)) is RECOMPUTE
    assert save_weight_matmuls.needs_calls and not save_matmuls.needs_calls
    assert (save_matmuls | save_weight_matmuls).needs_calls and (~save_weight_matmuls).needs_calls


def test_unbatched_leaves_other_ops_of_a_call_alone():
    call = Call(linear, (x3, meta(6, 4)), {})
    assert save_weight_matmuls(info(aten.add.Tensor, call=call)) is RECOMPUTE
    assert save_weight_matmuls(info(aten.convolution.default, call=call)) is RECOMPUTE


# -- the catalogue ------------------------------------------------------------------------------------

COSTLY = re.compile(
    r"mm($|_)|mv_?$|dot|matmul|conv|linear|attention|attn|einsum|bilinear|gemm|ger$|outer|inner$|rnn|lstm|gru"
)
# Packing and converting of weights, interpolation, and the composites and cells that run the ops above.
CHEAP = re.compile(
    r"reorder|prepack|pack_|_quantize_|convert|upsample|_thnn_|linear_combination|flatten_weight|mm_search"
    r"|(^|_)(gru|lstm|rnn_relu|rnn_tanh)(_cell)?$"
)
NAMESPACES = {"aten", "mkldnn", "mkl", "inductor", "mkldnn_prepacked", "onednn", "symm_mem", "torch_attn"}


def test_every_costly_op_of_this_torch_belongs_to_a_class():
    qualified = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    ours = [name.split("::") for name in qualified if name.split("::")[0] in NAMESPACES]
    unclaimed = [
        f"{space}::{name}"
        for space, name in ours
        if COSTLY.search(name) and not CHEAP.search(name) and f"{space}::{name}" not in catalogue._COSTLY
    ]
    assert not unclaimed
    # The walk itself works: this torch has more than a thousand ops.
    assert len(ours) > 1000


def test_no_class_claims_what_is_cheap():
    packet = lambda name: getattr(aten, name)  # noqa: E731
    for name in ("sin", "add", "softmax", "native_layer_norm", "upsample_bilinear2d", "view", "sum"):
        assert catalogue.kind_of(packet(name)) is None


def test_registered_ops_join_their_class():
    @torch.library.custom_op("remat_tests::gemm", mutates_args=())
    def gemm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    op = torch.ops.remat_tests.gemm.default
    try:
        assert save_matmuls(info(op)) is RECOMPUTE
        register_op(gemm, kind="attention")
        assert save_attention(info(op)) is SAVE and save_matmuls(info(op)) is RECOMPUTE
        register_op("remat_tests::gemm", kind="matmul")
        assert save_matmuls(info(op)) is SAVE and save_weight_matmuls(info(op)) is SAVE
        assert save_ops(gemm) == save_ops(op)
    finally:
        catalogue._COSTLY.pop("remat_tests::gemm", None)
        catalogue._KIND_OF.clear()


@pytest.mark.parametrize("how", ["custom_op", "triton_op"])
def test_a_registered_attention_op_is_kept_in_a_region(how):
    """A fused linear attention, as libraries register theirs."""
    name = f"remat_tests::linear_attention_{how}"

    def kernel(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q @ (k.mT @ k)

    if how == "triton_op":
        if not hasattr(torch.library, "triton_op"):
            pytest.skip("this torch has no triton_op")
        op: Any = torch.library.triton_op(name, mutates_args=())(kernel)
    else:
        op = torch.library.custom_op(name, mutates_args=())(kernel)
    op.register_autograd(
        lambda ctx, g: (g @ (ctx.k.mT @ ctx.k), None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "k", inputs[1]),
    )
    x, k = torch.rand(3, 4, requires_grad=True), torch.rand(3, 4)

    def region(x):
        return torch.sin(op(torch.sin(x), k)).sum()

    def again(policy):
        out = remat(region, policy=policy)(x)
        with OpCounter() as ops:
            out.backward()
        return ops[name.split("::")[1]]

    try:
        assert again(save_attention) == 1
        register_op(op, kind="attention")
        # What was learnt of the region before does not hold any more.
        assert again(save_attention) == 0
    finally:
        catalogue._COSTLY.pop(name, None)
        catalogue._KIND_OF.clear()
        forget()


def test_registering_refuses_mistakes():
    with pytest.raises(RematError, match="Unknown kind 'dot'"):
        register_op(aten.sin, kind="dot")  # type: ignore[arg-type]
    with pytest.raises(RematError, match="no namespace"):
        register_op("gemm", kind="matmul")
    with pytest.raises(RematError, match="torch.ops.aten.mm"):
        register_op(torch.mm, kind="matmul")


def test_none_is_jaxs_default():
    x = torch.ones(3, requires_grad=True)
    kept = [r.why for r in saved_residuals(remat(lambda x: x.sin().exp(), policy=None), x)]
    assert kept == ["argument"]
    assert remat(policy=None)(torch.sin)(x).equal(x.sin())
    last, _ = scan_remat(lambda c, x: (c * x, None), x[0], x, policy=None, checkpoints="all")
    last.backward()
    assert isinstance(apply_to(torch.nn.Linear(2, 2), policy=None), torch.nn.Linear)


def _answers_none(_):
    return None


def _compares_wrongly(op_info):
    return op_info.bytes > "1MiB"


class _RaisesByOp(Policy):
    def decide_by_op(self, op):
        raise TypeError("by op")


@pytest.mark.parametrize(
    ("policy", "fn"),
    crossed(
        [_answers_none, _compares_wrongly, where(lambda _: 1), _RaisesByOp()],  # pyright: ignore[reportArgumentType]
        [lambda x: x @ x, lambda x: x + x, lambda x: x * 2, lambda x: 2 - x, lambda x: 2 / x, lambda x: x**3],
    ),
)
def test_no_error_of_a_policy_is_lost_under_an_operator(fn, policy):
    x = torch.ones(2, 2)
    region = remat(fn, policy=policy, name="mine")
    for run in (lambda: region(x.requires_grad_()), lambda: torch.func.grad(lambda x: region(x).sum())(x)):
        with pytest.raises(RematError, match="aten|answered") as caught:
            run()
        assert not isinstance(caught.value, TypeError)


def test_an_op_is_registered_with_what_it_is_or_costs():
    name = "remat_tests::priced_twice"
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({}, "what it is"),
        ({"flops": 5}, "a function of the op's"),
    ]
    for mistake, told in mistakes:
        with pytest.raises(RematError, match=told):
            register_op(name, **mistake)
