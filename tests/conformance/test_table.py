"""The table of JAX's 80 tests in docs/jax.md claims no row that has no test, and leaves none out."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "jax.md"
FILES = {
    "R": "test_jax_remat",
    "P": "test_jax_policies",
    "C": "test_jax_control_flow",
    "T": "test_jax_compiled",
}
# Where one test of ours holds several of JAX's, by parameters or one after the other.
ELSEWHERE = {
    **{(row, "T"): "test_caching" for row in (5, 6, 47, 48, 49, 50, 51)},
    (6, "R"): "test_remat_retracing",
    (24, "T"): "test_no_cse_widget",
    **{(row, "R"): "test_prevent_cse" for row in (25, 77, 78, 79)},
    **{(row, "P"): "test_remat_checkpoint_dots" for row in (29, 30)},
    **{(row, "C"): "test_remat_custom_rules_in_scan" for row in (33, 34, 36)},
    **{(row, "P"): "test_name_saveable" for row in (38, 39)},
    **{(row, "R"): "test_vjp_caching" for row in (47, 49)},
    (51, "R"): "test_fwd_caching",
    (62, "C"): "test_remat_of_scan_funky_custom_jvp",
    **{(row, "C"): "test_remat_checkpoint_dots_cond" for row in (65, 66)},
    (69, "C"): "test_remat_of_cond_funky_custom_jvp",
    (75, "R"): "test_concreteness_error_includes_user_code",
}


def rows() -> list[tuple[int, str, str, list[str]]]:
    found = re.findall(
        r"^\| (\d+) \| (\S+)(?: \(\d\))? \| (pass|adapted|no meaning) \| ([RPCT, ]*?) ?\|",
        PAGE.read_text(),
        re.MULTILINE,
    )
    return [(int(n), name, kind, where.replace(",", " ").split()) for n, name, kind, where in found]


def defined_in(stem: str) -> set[str]:
    tree = ast.parse((HERE / f"{stem}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_all_rows_are_there_and_counted():
    assert [number for number, *_ in rows()] == list(range(1, 81))
    kinds = Counter(kind for _, _, kind, _ in rows())
    told = f"{kinds['pass']} pass, {kinds['adapted']} are adapted, {kinds['no meaning']} have no meaning"
    assert told in PAGE.read_text()


@pytest.mark.parametrize(("number", "name", "kind", "where"), rows(), ids=lambda value: str(value))
def test_every_claim_has_its_test(number, name, kind, where):
    assert where or kind == "no meaning"
    for letter in where:
        test = ELSEWHERE.get((number, letter), f"test_{name}")
        assert test in defined_in(FILES[letter]), f"row {number} names no test of {FILES[letter]}.py"


def test_the_other_names_are_needed():
    named = {(number, letter): f"test_{name}" for number, name, _, where in rows() for letter in where}
    assert set(ELSEWHERE) <= set(named)
    assert all(named[at] != test for at, test in ELSEWHERE.items())
