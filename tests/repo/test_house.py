"""The rules of the house: rooms are folders, and only their faces are imported from outside."""

from __future__ import annotations

from collections import defaultdict

from tests.repo.house import (
    ENGINE,
    back_doors,
    classes,
    cycles,
    graph,
    modules,
    private_torch,
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
