"""Plans: the budget is obeyed and well spent, the file says what was decided, and a wrong one is refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import llama, mistral

from kvfold.convert.conversion import convert
from kvfold.convert.options import ConvertOptions
from kvfold.convert.planning.allocation import CostPoint, allocate, interpolate
from kvfold.convert.planning.plan import Plan
from kvfold.convert.planning.planner import PlanOptions, make_plan
from kvfold.model import KvfoldError


@pytest.fixture
def options(text_file: Path) -> ConvertOptions:
    return ConvertOptions(calibrate=(str(text_file),), calibrate_tokens=1024, calibrate_window=64, balance=0.1)


@pytest.fixture
def uneven(tmp_path: Path, tokenizer: Any) -> Path:
    """A model whose second layer has no use for its attention: its output projection is nearly nothing."""
    model = llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.mul_(1e-3)
    model.save_pretrained(tmp_path / "uneven")
    tokenizer.save_pretrained(tmp_path / "uneven")
    return tmp_path / "uneven"


def points(*costs: float, heads: int | None = None) -> list[CostPoint]:
    return [CostPoint(8 * (number + 1), heads, cost) for number, cost in enumerate(costs)]


def test_allocation_is_the_best_there_is() -> None:
    """Against all combinations, for convex curves measured at every width."""
    curves = [points(8.0, 4.0, 2.0, 1.0), points(1.0, 0.1, 0.01, 0.001), points(20.0, 19.0, 18.5, 18.2)]
    for budget in range(24, 96, 8):
        chosen = allocate(curves, budget, 8)
        assert sum(choice.width for choice in chosen) <= budget
        combinations = itertools.product(*curves)
        best = min(
            sum(point.cost for point in some) for some in combinations if sum(each.width for each in some) <= budget
        )
        assert sum(choice.cost for choice in chosen) == pytest.approx(best)


def test_allocation_takes_the_better_number_of_windows() -> None:
    curve = points(4.0, 1.0, 0.5) + points(2.0, 1.5, 1.4, heads=1)
    assert [(choice.width, choice.key_heads) for choice in allocate([curve], 8, 8)] == [(8, 1)]
    assert [(choice.width, choice.key_heads) for choice in allocate([curve], 24, 8)] == [(24, None)]


def test_interpolation_is_log_linear_and_falls() -> None:
    measured = [(8, 1.0), (16, 0.01), (24, 0.02)]
    assert interpolate(measured, 12) == pytest.approx(0.1)
    assert interpolate(measured, 24) == pytest.approx(0.01)
    assert interpolate(measured, 4) == pytest.approx(1.0)


def test_a_plan_gives_where_it_helps_and_is_obeyed(uneven: Path, tmp_path: Path, options: ConvertOptions) -> None:
    plan = make_plan(str(uneven), PlanOptions(replace(options, cache_fraction=0.5)))
    widths = [layer.latent_width for layer in plan.layers]
    assert widths[1] < min(widths[0], widths[2])
    assert sum(widths) <= 3 * 16
    assert plan.cost < plan.uniform_cost
    plan.write(tmp_path / "plan.yaml")
    assert Plan.read(str(tmp_path / "plan.yaml")) == plan

    result = convert(str(uneven), str(tmp_path / "out"), replace(options, plan=str(tmp_path / "plan.yaml")))
    assert [layer["latent_width"] for layer in result.recipe.layers] == widths
    assert result.recipe.planned
    assert (tmp_path / "out" / "plan.yaml").read_text() == (tmp_path / "plan.yaml").read_text()
    automatic = convert(str(uneven), str(tmp_path / "auto"), replace(options, auto_plan=True))
    assert [layer["latent_width"] for layer in automatic.recipe.layers] == widths


def test_a_plan_may_choose_the_number_of_windows(source: Path, tmp_path: Path, options: ConvertOptions) -> None:
    wanted = PlanOptions(replace(options, cache_fraction=0.3), key_heads=(1, 2), min_width=8, max_width=24)
    plan = make_plan(str(source), wanted)
    assert {point[1] for layer in plan.curves or [] for point in layer} == {1, None}
    assert all(8 <= layer.latent_width <= 24 for layer in plan.layers)
    plan.write(tmp_path / "plan.yaml")
    recipe = convert(str(source), str(tmp_path / "out"), replace(options, plan=str(tmp_path / "plan.yaml"))).recipe
    assert recipe.cache_fraction == pytest.approx(plan.cache_fraction)


def test_a_plan_edited_by_hand(source: Path, tmp_path: Path, options: ConvertOptions) -> None:
    file = tmp_path / "plan.yaml"
    make_plan(str(source), PlanOptions(options)).write(file)
    entries = yaml.safe_load(file.read_text())

    def refused(says: str, **changes: Any) -> None:
        file.write_text(yaml.safe_dump(entries | changes))
        with pytest.raises(KvfoldError, match=says):
            convert(str(source), str(tmp_path / "out"), replace(options, plan=str(file)))
        assert not (tmp_path / "out").exists()

    layers = entries["layers"]
    refused("layer 1: latent width 99 is out of range", layers=[layers[0], {"latent_width": 99}, layers[2]])
    refused("layer 0 needs whole numbers", layers=[{"latent_width": "wide"}, *layers[1:]])
    refused("layer 2: 7 key heads are out of range", layers=[*layers[:2], {"latent_width": 20, "key_heads": 7}])
    refused("is damaged", layers=[{"width": 3}])
    refused("not a plan of format", format=7)
    refused("is for another model", layers=layers[:2])
    file.write_text(yaml.safe_dump(entries | {"layers": [{"latent_width": width} for width in (12, 16, 32)]}))
    recipe = convert(str(source), str(tmp_path / "out"), replace(options, plan=str(file))).recipe
    assert [layer["latent_width"] for layer in recipe.layers] == [12, 16, 32]
    assert json.loads((tmp_path / "out" / "kvfold.json").read_text())["planned"] is True


def test_a_plan_for_another_model(source: Path, tmp_path: Path, options: ConvertOptions, tokenizer: Any) -> None:
    make_plan(str(source), PlanOptions(options)).write(tmp_path / "plan.yaml")
    mistral().save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(KvfoldError, match="is for another model"):
        convert(str(tmp_path / "other"), str(tmp_path / "out"), replace(options, plan=str(tmp_path / "plan.yaml")))


def test_a_budget_out_of_reach_says_the_least(source: Path, options: ConvertOptions) -> None:
    wanted = PlanOptions(replace(options, cache_fraction=0.25), min_width=12)
    with pytest.raises(KvfoldError, match=r"out of reach: .* the least is 0\.375"):
        make_plan(str(source), wanted)
    with pytest.raises(KvfoldError, match="widths 40 to 32 are out of range for this model: 2 to 32"):
        make_plan(str(source), PlanOptions(options, min_width=40))
