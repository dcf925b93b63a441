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
    "K": "test_jax_calls",
    "P": "test_jax_policies",
    "C": "test_jax_control_flow",
    "L": "test_jax_loops",
    "T": "test_jax_compiled",
}
# Where one test of ours holds several of JAX's, by parameters or one after the other.
ELSEWHERE = {
    **{(row, "T"): "test_caching" for row in (5, 6, 47, 48, 49, 50, 51)},
    (24, "T"): "test_no_cse_widget",
    **{(row, "C"): "test_remat_custom_rules_in_scan" for row in (33, 34, 36)},
    (62, "L"): "test_remat_of_scan_funky_custom_jvp",
    (69, "L"): "test_remat_of_cond_funky_custom_jvp",
}


def rows() -> list[tuple[int, str, str, list[str]]]:
    found = re.findall(
        r"^\| (\d+) \| (\S+)(?: \(\d\))? \| (pass|adapted|no meaning) \| ([RKPCLT, ]*?) ?\|",
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
    told = f"{kinds['pass']} pass, {kinds['adapted']} are adapted, {kinds['no meaning']} has no meaning"
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


TORCHS = {
    "C": "checkpoint",
    "N": "nested",
    "U": "utils",
    "S": "selective",
    "T": "tags",
    "D": "compiled",
    "B": "breaks",
    "G": "one_graph",
}
# Where one test of ours holds several of torch's: by name in a dictionary, or by parameters.
TABLES = {"test_tags": "T", "test_counts": "D"}  # and the file
GROUPED = {
    "test_nonlocal": ("mutation", "list_mutation", "list_mutation_hidden"),
    "test_ac_rematerialize": ("simple_forward_backward", "with_selective_checkpoint_policy"),
    "test_joint_graph_passes": ("view_optimization", "permute_optimization"),
    "test": ("chunked_loss_remat", "two_backward_regions_needing_remat_errors"),
}
OURS = ("test_backwards_in_a_graph",)


def torchs_rows() -> list[tuple[str, str, str]]:
    pattern = r"^\| (test_\w+) \| (pass|adapted|refused on purpose) \| ([CNUSTDBG]) \|"
    return re.findall(pattern, (PAGE.parent / "trust.md").read_text(), re.MULTILINE)


def test_torchs_tests_are_all_told_and_counted():
    """docs/trust.md names each test of the eight files, and none that is not there."""
    stems = {letter: f"test_torch_{name}" for letter, name in TORCHS.items()}
    defined = {(name, letter) for letter, stem in stems.items() for name in defined_in(stem)}
    tables = "".join((HERE / f"{stems[letter]}.py").read_text() for letter in TABLES.values())
    grouped = {f"{stem}_{name}" for stem, names in GROUPED.items() for name in names}
    told = {(name, letter) for name, _, letter in torchs_rows()}
    missing = {name for name, letter in told - defined if f'"{name}":' not in tables} - grouped
    tests = {pair for pair in defined if pair[0].startswith("test_")}
    assert not missing
    assert {name for name, _ in tests - told} == {*OURS, *TABLES, *GROUPED} - {"test"}
    kinds = Counter(kind for _, kind, _ in torchs_rows())
    assert f"{kinds['pass']} pass, {kinds['adapted']} are adapted" in (PAGE.parent / "trust.md").read_text()


def test_equinoxs_tests_are_all_told_and_counted():
    """The rows that have no place of their own: every test of test_equinox.py, one of them two."""
    text = (PAGE.parent / "trust.md").read_text().partition("## equinox's tests")[2].partition("\n## ")[0]
    told = re.findall(r"^\| (test_\w+) \| (pass|adapted) \|", text, re.MULTILINE)
    names = {re.sub("(un)?batched_cond$", "", name).rstrip("_") for name, _ in told}
    assert names == {name for name in defined_in("test_equinox") if name.startswith("test_")}
    kinds = Counter(kind for _, kind in told)
    assert f"{kinds['pass']} pass, {kinds['adapted']} are adapted." in text


def test_torch_remats_tests_are_all_told_and_counted():
    """Each row is a test, a program of one, or said to be in one."""
    text = (PAGE.parent / "trust.md").read_text().partition("## torch_remat's tests")[2].partition("\n## ")[0]
    told = re.findall(r"^\| (test_\w+) \| (pass|adapted) \|", text, re.MULTILINE)
    files = [(HERE / f"test_torch_remat{part}.py").read_text() for part in ("", "_calls", "_hooks")]
    there = set(re.findall(r"\btest_\w+", "".join(files)))
    assert not {name for name, _ in told} - there
    kinds = Counter(kind for _, kind in told)
    assert f"{kinds['pass']} pass, {kinds['adapted']} are adapted." in text
