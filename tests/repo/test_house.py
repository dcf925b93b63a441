"""The rules of the house: rooms are folders, and only their faces are imported from outside."""

from __future__ import annotations

from collections import defaultdict

from tests.repo.house import (
    ENGINE,
    ROOT,
    back_doors,
    classes,
    cycles,
    graph,
    modules,
    private_torch,
    reads_inside,
    unshown,
    within,
)

# What had a name of something else when this test was written. Nothing is added here.
SHARED_NAMES = {
    *("Choice", "Given", "Graph", "Kept", "Measured"),
    *("Part", "Plan", "Record", "Recomputed", "Ref", "Region", "Residuals", "Schedule", "Store"),
    *("Work", "_Fence", "_Search"),
}


def test_no_import_goes_in_a_circle():
    assert not cycles(graph())


def test_only_faces_are_imported_from_other_rooms():
    assert not [f"{one.importer}:{one.line} {one.target} ({one.name})" for one in back_doors()]


def test_faces_list_what_the_product_takes_from_the_engine():
    assert not [f"{one.importer}:{one.line} {one.target}.{one.name}" for one in unshown()]


def test_private_names_of_torch_are_in_one_room():
    found = [
        f"{module}:{line} {name}"
        for module, path in modules().items()
        if not within(module, f"{ENGINE}.compat")
        for line, name in private_torch(path)
    ]
    assert not found


def test_a_class_name_means_one_thing():
    found = defaultdict(set)
    for name, module in classes():
        found[name].add(module)
    shared = {name for name, where in found.items() if len(where) > 1}
    assert shared == SHARED_NAMES, {name: sorted(found[name]) for name in shared ^ SHARED_NAMES}


# Which files of tests take names from modules that are not public, and why. Nothing is added here: what
# several read is in `tests/inside.py`, and what a program of the bank can show is shown there.
READS_INSIDE = {
    "what all tests share: first calls are forgotten, prices are pretended, lanes are watched": """
        conftest helpers inside lanes regions/conftest plan/conftest plan/models plan/problems
        scan/scans fuzz/scans""",
    "solvers against brute force, on problems of their own": """
        plan/test_chain plan/test_host plan/test_parts plan/test_portfolio plan/test_refuted plan/test_solvers
        scan/test_schedules""",
    "prices and plans, by the graphs that they are made of": """
        plan/test_collectives plan/test_costs plan/test_fit plan/test_graph plan/test_layout plan/test_pareto
        plan/test_paths plan/test_peak plan/test_speeds plan/test_step policies/test_flops""",
    "what is planned once: traces are counted": """
        plan/test_caches plan/test_trusted""",
    "graphs and code of compilers, before they run": """
        compile/test_alike compile/test_capture compile/test_constants compile/test_gpu
        compile/test_gpu_attention compile/test_gpu_scans compile/test_graphs compile/test_inductor
        compile/test_once compile/test_plans compile/test_traversals tools/test_debug
        scan/test_compile scan/test_in_compile scan/test_inductor""",
    "what goes to the host, and when": """
        policies/test_offload policies/test_second_calls scan/test_counts scan/test_offload""",
    "one part of the machinery by itself": """
        composition/test_grad policies/test_names policies/test_policies policies/test_attention_in_parts
        regions/test_ambient regions/test_constants regions/test_guard regions/test_inner_backward_time
        regions/test_only_shapes regions/test_pytrees regions/test_split_backward regions/test_threads
        scan/test_changes scan/test_jacobians scan/test_semantics conformance/test_jax_compiled
        conformance/test_jax_control_flow interop/later_worker interop/many_worker""",
    "parts of the command line and of reports": """
        tools/test_cli tools/test_cli_errors tools/test_cockpit tools/test_explain tools/test_gpu_cli
        tools/test_units""",
}


def test_files_that_read_the_inside_are_listed_with_a_reason():
    listed = {name for names in READS_INSIDE.values() for name in names.split()}
    found = {
        path.relative_to(ROOT / "tests").with_suffix("").as_posix()
        for path in (ROOT / "tests").rglob("*.py")
        if reads_inside(path)
    }
    assert found == listed, found ^ listed
