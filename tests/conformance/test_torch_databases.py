"""torch's OpInfo and ModuleInfo: each op and each module as a region, against itself without remat.

The quick suite has some ops of each kind; `python -m tests.conformance.test_torch_databases` prints the table
of all.
"""

import sys
from collections import Counter

import pytest

from tests.conformance import torch_db
from tests.conformance.differential import Verdict, compare
from tests.helpers import FEW

pytestmark = pytest.mark.filterwarnings("ignore")
# Plain, in place, random, with views, with several results, with kernels that look at what others do not.
OPS = (
    "nn.functional.rrelu",
    "nn.functional.dropout",
    "nn.functional.batch_norm",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.embedding",
    "unsafe_chunk",
    "unsafe_split",
    "sparse.mm.reduce",
    "linalg.svd",
    "var_mean",
    "index_put",
    "bernoulli",
    "new_empty",
    "nn.functional.binary_cross_entropy_with_logits",
    "to_sparse",
)
PARTS = 8
# All that share memory and do not say so, of torch's database on a CPU.
UNDECLARED = {"aten._unsafe_view.default", "aten.unsafe_split.Tensor", "aten.unsafe_split_with_sizes.default"}


def verdicts_of_op(name: str, most: int = 3, few: tuple[str, ...] = FEW) -> list[Verdict]:
    return [v for program in torch_db.op_programs(name, most) for v in compare(program, few)]


def verdicts_of_module(name: str, few: tuple[str, ...] = FEW) -> list[Verdict]:
    return [v for on in (True, False) for p in torch_db.module_programs(name, on, 1) for v in compare(p, few)]


def check(found: list[Verdict]) -> None:
    assert found
    bad = [v for v in found if v.kind in ("wrong", "failed")]
    assert not bad, "\n".join(map(str, bad))


@pytest.mark.parametrize("name", OPS)
def test_ops(name):
    check(verdicts_of_op(name))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_other_ops(part):
    others = [name for name in torch_db.databases()[0] if name not in OPS]
    some = enumerate(others[part::PARTS])  # a policy each; the table's command has them all
    check([v for at, name in some for v in verdicts_of_op(name, 1, FEW[at % 3 :][:1])])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_modules(part):
    some = enumerate([*torch_db.databases()[1]][part::PARTS])
    check([v for at, name in some for v in verdicts_of_module(name, FEW[at % 3 :][:1])])


@pytest.mark.slow
def test_memory_that_is_shared_unsaid():
    found: set[str] = set()
    for name in torch_db.databases()[0]:
        for program in torch_db.op_programs(name, most=1):
            fn, leaves = program.build(lambda fn: fn)
            try:
                with torch_db.Undeclared() as mode:
                    fn(*leaves)
            except (RuntimeError, NotImplementedError):
                continue  # without meaning in torch
            found |= mode.found
    assert found <= UNDECLARED, "new ones: see that the tape finds their roots"


def main(names: list[str]) -> int:
    """Print what came out, for all or for some names; 1 if anything is wrong."""
    ops, modules = torch_db.databases()
    found: list[Verdict] = []
    for of, known in ((verdicts_of_op, ops), (verdicts_of_module, modules)):
        for name in names or known:
            if name in known:
                found += of(name)
    kinds = ("right", "refused", "failed", "wrong", "not in torch")
    print("| run | " + " | ".join(kinds) + " |\n|---|" + "---|" * len(kinds))
    counts = Counter((v.run, v.kind) for v in found)
    for run in sorted({v.run for v in found}):
        print(f"| {run} | " + " | ".join(str(counts[run, kind]) for kind in kinds) + " |")
    for kind in ("wrong", "failed", "refused"):
        grouped = Counter((v.text[:90], v.program.split("[")[0]) for v in found if v.kind == kind)
        for (text, program), count in grouped.most_common():
            print(f"{kind}: {program} ({count}): {text}")
    return int(any(v.kind == "wrong" for v in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
