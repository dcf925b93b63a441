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
    *("Given", "Graph", "Kept", "Measured"),
    *("Part", "Plan", "Recomputed", "Ref", "Region", "Residuals", "Schedule", "Store"),
    *("Work", "_Fence"),
}


def test_no_import_goes_in_a_circle():
    assert not cycles(graph())


def test_only_faces_are_imported_from_other_rooms():
    assert not [f"{one.importer}:{one.line} {one.target} ({one.name})" for one in back_doors()]


def test_faces_list_what_the_product_takes_from_the_engine():
    assert not [f"{one.importer}:{one.line} {one.target}.{one.name}" for one in unshown()]


# Where private names of torch are used: by the engine, by the product, and by what makes code for a GPU.
OF_TORCH = (f"{ENGINE}.compat", "remat._torch", "remat.gpu.inductor")


def test_private_names_of_torch_are_in_their_rooms():
    found = [
        f"{module}:{line} {name}"
        for module, path in modules().items()
        if not any(within(module, room) for room in OF_TORCH)
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
# several read is in `tests/inside.py`, what one room reads in its `inside.py`, each name with its reason.
READS_INSIDE = {
    "what all tests share: first calls are forgotten, prices are pretended, lanes are watched": """
        conftest helpers inside lanes""",
    "the door of a room": """
        compile/inside plan/inside policies/inside regions/inside scan/inside tools/inside""",
    "the list of what is exchanged in torch": "repo/test_patches",
    "ranks that do not answer: how long is waited for them is set to seconds": """
        interop/later_worker interop/many_worker""",
}


def test_files_that_read_the_inside_are_listed_with_a_reason():
    listed = {name for names in READS_INSIDE.values() for name in names.split()}
    found = {
        path.relative_to(ROOT / "tests").with_suffix("").as_posix()
        for path in (ROOT / "tests").rglob("*.py")
        if reads_inside(path)
    }
    assert found == listed, found ^ listed
