"""Checkpoints written by kvfold 0.1.0 go on loading, with the logits that they had then.

``tests/fixtures/checkpoints`` has one small folder of each kind of folded model and of the study's, made from the
random models of ``helpers.py`` with two layers and 96 tokens, and beside each the token ids and logits of that day.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import relative
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kvfold.model import FoldedLayout

FOLDERS = sorted(path.parent for path in (Path(__file__).parents[1] / "fixtures").glob("checkpoints/*/config.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_logits_of_kept_checkpoints(folder: Path) -> None:
    kept = load_file(folder / "expected.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert relative(model(kept["ids"], use_cache=False).logits, kept["logits"]) < 1e-5
        cut = 16  # the rest is read from the cache
        begun = model(kept["ids"][:, :cut], use_cache=True)
        rest = model(kept["ids"][:, cut:], past_key_values=begun.past_key_values)
    assert relative(torch.cat([begun.logits, rest.logits], 1), kept["logits"]) < 1e-4


def test_every_kind_is_kept() -> None:
    """One of span ``all``, one of ``head``, one with narrowed windows, and one of the study's with twisted queries."""
    configs = {folder.name: json.loads((folder / "config.json").read_text()) for folder in FOLDERS}
    assert set(configs) == {"span-all", "span-head", "narrowed", "q=k-v+"}
    assert configs.pop("q=k-v+")["variant"] == "q=k-v+"
    layouts = {
        name: [FoldedLayout.from_dict(entry) for entry in config["kvfold"]["layers"]]
        for name, config in configs.items()
    }
    assert {layout.span for layout in layouts["span-head"]} == {"head"}
    assert all(layout.span == "all" and layout.rotary_pairs is None for layout in layouts["span-all"])
    assert all(layout.rotary_pairs is not None for layout in layouts["narrowed"])
