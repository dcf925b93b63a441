"""Which modules a description of layers means: one language for `nn.apply`, `fit` and `Layout`."""

from typing import Any

import pytest
import torch
from torch import nn

import remat
from remat import RematError, fit
from remat.nn import LayerError, apply, regions, remove
from remat.plan import Layout


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Other(Block):
    pass


class Model(nn.Module):
    """Lists of lists, and one block by two paths."""

    def __init__(self):
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.ModuleList([Block(), Other()]) for _ in range(4))
        self.first = self.layers[0][0]

    def forward(self, x):
        for pair in self.layers:
            for block in pair:
                x = block(x)
        return x.square().mean()


EVERY = [f"layers.{k}.{j}" for k in range(4) for j in range(2)]


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ("layers.*.*", EVERY),
        ("*.layers.*.*", EVERY),
        (
            (name for name in ["layers.*.0", "layers.1.1"]),
            [*EVERY[::2][:1], "layers.1.0", "layers.1.1", *EVERY[4::2]],
        ),
        ((cls for cls in [Block]), EVERY),
        ([Other, "layers.3.0"], [*EVERY[1::2][:3], "layers.3.0", "layers.3.1"]),
        (lambda name, module: isinstance(module, Other), EVERY[1::2]),
        ("first", ["first"]),
    ],
)
def test_what_a_description_means(layers, found):
    assert regions(apply(Model(), layers=layers)) == ["layers.0.0" if n == "first" else n for n in found]


def test_modules_themselves():
    model = Model()
    assert regions(apply(model, layers=model.layers[2])) == ["layers.2.0", "layers.2.1"]
    assert regions(apply(remove(model), layers=model.layers[1][0])) == ["layers.1.0"]
    assert regions(apply(remove(model), layers=[model.layers[3][1], model.first])) == [
        "layers.0.0",
        "layers.3.1",
    ]
    with pytest.raises(LayerError, match="got a Block that is no part of the Model. Write layers=Block"):
        apply(model, layers=[model.first, Block()])
    with pytest.raises(LayerError, match="got 3 of type int"):
        apply(model, layers=3)  # type: ignore[arg-type]
    with pytest.raises(LayerError, match="got None"):
        apply(model, layers=["layers.*.*", None])


@pytest.mark.parametrize("layers", ["layers.*", "*.layers.*", nn.ModuleList, "layers"])
def test_a_hint_fits_what_is_there(layers):
    model = Model()
    with pytest.raises(LayerError, match=r"Write layers='layers\.\*\.\*'"):
        apply(model, layers=layers)
    with pytest.raises(LayerError, match=r"lists of modules in it: 'layers\.\*\.\*'\. Write"):
        apply(model, layers="*.h.*")
    assert regions(apply(model, layers="layers.*.*")) == EVERY


def test_a_hint_names_classes_where_a_pattern_would_hit_lists():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.ModuleList([nn.ModuleList([nn.LayerNorm(8)]), kind()]) for kind in (Block, Other)
            )

    with pytest.raises(LayerError, match=r"Write layers=\(Block, Other\)"):
        apply(Normed(), layers="layers.*")


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.layers:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("layers", ["layers.*", "*.layers.*", "layers.[0-9]", ["layers.0", "layers.[12]"]])
def test_layouts_and_fits_read_the_same_patterns(layers):
    model, x = Flat(), torch.randn(256, 8)
    names = regions(apply(model, layers=layers))
    remove(model)
    plan = fit(model, x, mesh=Layout(layers=layers), memory="1GiB", device="h100")
    assert list(plan.stages[0].blocks) == names
    plain = remat.fit(model, x, peak="1GiB", layers=layers)
    assert set(remat.fit(model, x, peak=plain.plain_bytes - 4, layers=layers).applied) <= set(names)


def test_layouts_of_lists_of_lists_and_iterators():
    model, x = Model(), torch.randn(4, 8)
    several: Any = "layers.*.*", (name for name in ["layers.*.0", "layers.*.1"])
    for layers in several:
        plan = fit(model, x, mesh=Layout(layers=layers), memory="1GiB", device="h100")
        assert list(plan.stages[0].blocks) == EVERY
    with pytest.raises(
        RematError, match=r"Layout\(layers='layers\.\*'\) hits .* Write layers='layers\.\*\.\*'"
    ):
        fit(model, x, mesh=Layout(layers="layers.*"), memory="1GiB", device="h100")
    wrongs: Any = Block, 3, [Block], ()
    for wrong in wrongs:
        with pytest.raises(RematError, match="write a pattern for qualified names"):
            Layout(layers=wrong)


def test_a_module_that_holds_itself_is_walked_through():
    model = Flat()
    model.layers[0].owner = model
    assert regions(apply(model, layers="layers.*")) == ["layers.0", "layers.1", "layers.2"]
