"""Every family: exact at full width, a plain model when folded, the same from the cache, exported, and without kvfold.

What is measured on the way makes the README's table of families; ``--write-readme`` writes it there.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES
from helpers import SIZES, relative
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from kvfold.analysis.logits import output_logits
from kvfold.convert.conversion import convert
from kvfold.convert.export import ExportOptions, export
from kvfold.convert.native import native_model
from kvfold.convert.options import ConvertOptions
from kvfold.finetune.distillation import teach
from kvfold.finetune.documents import document_inputs
from kvfold.finetune.loss import LossWeights
from kvfold.finetune.trainable import LoraSettings, choose, share_frozen, without_dropout
from kvfold.model import KvfoldError, families, family_of

NAMES = sorted(FAMILIES)
COLUMNS = ("exact", "folded", "cached", "exported")
FIGURES: dict[str, dict[str, float]] = {name: {} for name in NAMES}


def note(name: str, column: str, figure: float) -> float:
    """Keep the largest difference that was measured of a family."""
    FIGURES[name][column] = max(figure, FIGURES[name].get(column, 0.0))
    return figure


def test_every_family_has_a_model() -> None:
    assert families() == NAMES


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, text_file: Path) -> Any:
    """Convert a family's model with some options; returns source and folded model. Each is made once."""
    folder, made = tmp_path_factory.mktemp("families"), {}

    def get(
        name: str, method: str, fraction: float = 0.5, span: str = "all", rotary_pairs: int | str = "auto"
    ) -> tuple[Any, Any, Path]:
        source = folder / name
        if not source.exists():
            FAMILIES[name]().save_pretrained(source)
            tokenizer.save_pretrained(source)
        key = (name, method, fraction, span, rotary_pairs)
        if key not in made:
            out = folder / "-".join(map(str, key))
            options = ConvertOptions(
                method=method,
                cache_fraction=fraction,
                span=span,
                rotary_pairs=rotary_pairs,
                calibrate=(str(text_file),),
                calibrate_tokens=1024,
                calibrate_window=64,
                balance=0.1,
            )
            convert(str(source), str(out), options)
            models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (source, out)]
            made[key] = (*models, out)
        return made[key]

    return get


@pytest.mark.parametrize("span", ["all", "head"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_full_width_is_the_source(converted: Any, name: str, span: str, ids: torch.Tensor) -> None:
    source, folded, _ = converted(name, "svd", 1.0, span)
    assert note(name, "exact", relative(folded(ids).logits, source(ids).logits)) < 1e-4


@pytest.mark.parametrize(
    ("method", "fraction", "span"),
    [("calibrated", 0.5, "all"), ("calibrated", 0.5, "head"), ("svd", 0.75, "head"), ("mean", 0.5, "head")],
)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_folded_is_the_plain_class_with_folded_weights(
    converted: Any, name: str, method: str, fraction: float, span: str, ids: torch.Tensor
) -> None:
    source, folded, _ = converted(name, method, fraction, span)
    plain = native_model(folded)
    assert type(plain) is type(source)
    assert note(name, "folded", relative(folded(ids).logits, plain(ids).logits)) < 1e-4


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_documents_in_one_sequence_do_not_see_each_other(converted: Any, name: str, ids: torch.Tensor) -> None:
    # Positions that start anew tell transformers where a document begins; training on packed text rests on it.
    positions = torch.cat((torch.arange(7), torch.arange(13))).expand(2, -1)
    for model in map(copy.deepcopy, converted(name, "calibrated")[:2]):
        without_dropout(model)
        for training in (False, True):
            model.train(training)
            packed = model.base_model(ids, use_cache=False, **document_inputs(model, positions)).last_hidden_state
            apart = [model.base_model(part, use_cache=False).last_hidden_state for part in ids.split([7, 13], dim=1)]
            assert relative(packed, torch.cat(apart, dim=1)) < 1e-4


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits_of_hidden_states_are_the_models(converted: Any, name: str, ids: torch.Tensor) -> None:
    for model in converted(name, "calibrated")[:2]:
        hidden = model.base_model(ids, use_cache=False).last_hidden_state
        torch.testing.assert_close(output_logits(model, hidden), model(ids, use_cache=False).logits)


@pytest.mark.parametrize("name", NAMES)
def test_learns_from_its_source(converted: Any, name: str, ids: torch.Tensor) -> None:
    source, folded = (copy.deepcopy(model) for model in converted(name, "mean", 0.5, "head")[:2])
    model = choose(folded, "lora", LoraSettings(rank=4, alpha=8))
    share_frozen(folded, source)
    teach(folded, source, LossWeights(hidden=0.1))
    optimiser = torch.optim.Adam((each for each in model.parameters() if each.requires_grad), lr=5e-3)
    batch = {"input_ids": ids, "position_ids": torch.arange(20).expand(2, -1), "labels": ids}
    before = model.eval()(**batch)["loss"].item()
    model.train()
    for _ in range(8):
        optimiser.zero_grad()
        model(**batch)["loss"].backward()
        optimiser.step()
    after = model.eval()(**batch)["loss"].item()
    del folded.forward
    with torch.no_grad():
        adapted = model(input_ids=ids, use_cache=False).logits
        merged = model.merge_and_unload()(input_ids=ids, use_cache=False).logits
    assert after < 0.7 * before
    assert relative(merged, adapted) < 1e-4


@pytest.mark.parametrize("implementation", ["default", "eager"])
@pytest.mark.parametrize("span", ["all", "head"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_cached_decoding_is_the_full_pass(
    converted: Any, name: str, span: str, implementation: str, ids: torch.Tensor
) -> None:
    _, folded, _ = converted(name, "calibrated", 0.5, span)
    before = folded.config._attn_implementation
    try:
        if implementation != "default":
            folded.set_attn_implementation(implementation)
        whole = folded(ids).logits
        out = folded(ids[:, :5], use_cache=True)
        steps = [out.logits]
        for stop in (6, 7, 12, 13, 20):  # single tokens and chunks; sliding windows fill on the way
            out = folded(ids[:, out.cache.get_seq_length() : stop], cache=out.cache, use_cache=True)
            steps.append(out.logits)
        assert note(name, "cached", relative(torch.cat(steps, dim=1), whole)) < 2e-5
        width = folded.config.layouts()[0].latent_width
        assert out.cache.layers[0].keys.shape[-1] == width
        assert out.cache.layers[0].values.numel() == 0
    finally:
        folded.set_attn_implementation(before)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_below_half(converted: Any, name: str, ids: torch.Tensor) -> None:
    """Narrowed windows (where keys are rotated): cached decoding is the full pass."""
    _, folded, _ = converted(name, "calibrated", 0.375)
    whole = folded(ids).logits
    out = folded(ids[:, :5], use_cache=True)
    steps = [out.logits]
    for stop in (6, 7, 12, 13, 20):
        out = folded(ids[:, out.cache.get_seq_length() : stop], cache=out.cache, use_cache=True)
        steps.append(out.logits)
    assert note(name, "cached", relative(torch.cat(steps, dim=1), whole)) < 2e-5
    for layout, traits in zip(folded.config.layouts(), family_of(folded.config).traits_of(folded), strict=True):
        full = 2 * traits.key_value_heads * traits.head_dim
        assert layout.latent_width == round(0.375 * full)
        assert layout.window_width(traits.rotary_dim // 2) <= layout.latent_width
        kept = layout.pairs(traits.rotary_dim // 2)
        assert not traits.key_norm or len(set(kept)) == 1


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gpt2", "opt", "qkv_gpt2")])
@torch.no_grad()
def test_slow_pairs_need_no_rotation(converted: Any, name: str, ids: torch.Tensor) -> None:
    """With nothing else lost, a pair that turns by hundredths of a radian in so few tokens can be read unrotated."""
    source, _, _ = converted(name, "svd", 1.0)
    pairs = max(traits.rotary_dim for traits in family_of(source.config).traits_of(source)) // 2
    _, folded, _ = converted(name, "calibrated", 1.0, rotary_pairs=pairs - 1)
    assert any(layout.rotary_pairs for layout in folded.config.layouts())
    slowest = 0.02 if pairs > 3 else 0.2  # radians in 20 tokens, to within what the family makes of the frequencies
    assert relative(folded(ids).logits, source(ids).logits) < slowest


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_generation_is_that_of_the_plain_class(converted: Any, name: str, ids: torch.Tensor) -> None:
    _, folded, _ = converted(name, "calibrated")
    plain, rows, mask = native_model(folded), ids.clone(), torch.ones_like(ids)
    rows[1, :6], mask[1, :6] = 1, 0
    for choice in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 20} | choice
        assert torch.equal(folded.generate(rows, **options), plain.generate(rows, **options)), choice


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name != "opt"]
)  # its decoder is an inner transformers class
@torch.no_grad()
def test_attention_weights_are_returned(converted: Any, name: str, ids: torch.Tensor) -> None:
    _, folded, _ = converted(name, "calibrated")
    before = folded.config._attn_implementation
    folded.set_attn_implementation("eager")
    out = folded(ids, output_attentions=True, output_hidden_states=True)
    folded.set_attn_implementation(before)
    assert [attention.shape for attention in out.attentions] == [(2, 6, 20, 20)] * 3
    assert len(out.hidden_states) == 4


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_export_is_the_source_s_class(converted: Any, name: str, ids: torch.Tensor, tmp_path: Path) -> None:
    source, folded, path = converted(name, "calibrated", 0.75)
    result = export(str(path), str(tmp_path / "plain"), ExportOptions())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    assert type(plain) is type(source)
    assert result.architecture == type(source).__name__
    assert note(name, "exported", relative(plain(ids).logits, folded(ids).logits)) < 1e-4
    assert result.difference < 1e-4


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_half_precision(converted: Any, name: str, ids: torch.Tensor) -> None:
    """Loaded in bfloat16 it runs with and without a cache, and is what float32 is but for rounding."""
    _, folded, path = converted(name, "svd", 1.0, "all")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    whole, exact = model(ids).logits, folded(ids).logits
    assert whole.dtype == torch.bfloat16
    # In all, not at most: where a mixture of experts rounds to another expert, that token's logits are others.
    assert float((whole.float() - exact).norm() / exact.norm()) < 0.1
    assert model.generate(ids, do_sample=False, max_new_tokens=5).shape == (2, 25)


@pytest.mark.parametrize("name", NAMES)
def test_lora_trains_and_merges(converted: Any, name: str, ids: torch.Tensor) -> None:
    model = copy.deepcopy(converted(name, "calibrated")[1])
    before = model(ids).logits.detach()
    targets = ["q_proj", "latent_proj", "value_map", "o_proj"]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    model.train()
    model(ids, labels=ids).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert all(torch.isfinite(parameter.grad).all() for parameter in trained)
    model.eval()
    with torch.no_grad():
        adapted = model(ids).logits
        out = model(ids[:, :9], use_cache=True)
        steps = [out.logits] + [model(ids[:, i : i + 1], cache=out.cache, use_cache=True).logits for i in range(9, 20)]
        assert relative(adapted, before) > 1e-3
        assert relative(torch.cat(steps, dim=1), adapted) < 2e-5
        assert relative(model.merge_and_unload()(ids).logits, adapted) < 2e-5


def test_every_family_loads_without_kvfold(converted: Any, ids: torch.Tensor, tmp_path: Path) -> None:
    paths = {name: str(converted(name, "calibrated")[2]) for name in NAMES}
    script = f"""
import sys
sys.modules["kvfold"] = None
import torch
import transformers
from transformers import AutoModelForCausalLM
for name, path in {paths!r}.items():
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules")
    with torch.no_grad():
        torch.save(model(torch.tensor({ids.tolist()})).logits, {str(tmp_path)!r} + "/" + name)
"""
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    for name in NAMES:
        with torch.no_grad():
            assert relative(torch.load(tmp_path / name), converted(name, "calibrated")[1](ids).logits) < 1e-6


ORIGINAL = 32  # tokens; the context before any of these stretches it
STRETCHED = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}


@pytest.mark.parametrize("rope", STRETCHED)
@torch.no_grad()
def test_stretched_rotations_work_past_the_original_context(tmp_path: Path, rope: str) -> None:
    positions = ORIGINAL if rope == "dynamic" else 4 * ORIGINAL
    parameters = {"rope_type": rope, "rope_theta": 1e4} | STRETCHED[rope]
    source = FAMILIES["llama"](max_position_embeddings=positions, rope_parameters=parameters)
    source.save_pretrained(tmp_path / "source")
    models = {}
    for fraction in (1.0, 0.5):
        options = ConvertOptions(method="svd", cache_fraction=fraction)
        convert(str(tmp_path / "source"), str(tmp_path / str(fraction)), options)
        models[fraction] = AutoModelForCausalLM.from_pretrained(tmp_path / str(fraction)).eval()
    ids = torch.randint(2, 320, (2, 3 * ORIGINAL), generator=torch.Generator().manual_seed(3))
    plain = native_model(models[0.5])
    for length in (ORIGINAL // 2, 3 * ORIGINAL):  # and back again: two kinds change their frequencies on the way
        rows = ids[:, :length]
        assert relative(models[1.0](rows).logits, source(rows).logits) < 1e-4
        assert relative(models[0.5](rows).logits, plain(rows).logits) < 1e-4
    whole = models[0.5](ids).logits
    out = models[0.5](ids[:, : ORIGINAL // 2], use_cache=True)
    steps = [out.logits]
    for stop in range(ORIGINAL // 2 + 1, 3 * ORIGINAL + 1):
        out = models[0.5](ids[:, stop - 1 : stop], cache=out.cache, use_cache=True)
        steps.append(out.logits)
    if rope in ("dynamic", "longrope"):
        # Tokens read before the context was exceeded had other frequencies then, in the source as well.
        inside = models[0.5](ids[:, : ORIGINAL - 1]).logits
        assert relative(torch.cat(steps, dim=1)[:, : ORIGINAL - 1], inside) < 2e-5
        assert torch.isfinite(torch.cat(steps, dim=1)).all()
    else:
        assert relative(torch.cat(steps, dim=1), whole) < 2e-5


def test_readme_tells_the_figures(request: pytest.FixtureRequest) -> None:
    if any(set(figures) != set(COLUMNS) for figures in FIGURES.values()):
        pytest.skip("only the whole file measures every figure")
    readme = Path(__file__).parents[2] / "README.md"
    begin, end = "<!-- families -->\n", "<!-- /families -->"
    before, _, rest = readme.read_text(encoding="utf-8").partition(begin)
    told, _, after = rest.partition(end)
    if request.config.getoption("--write-readme"):
        lines = ["| family | " + " | ".join(COLUMNS) + " |", "| --- " * (1 + len(COLUMNS)) + "|"]
        for name in NAMES:
            lines.append(f"| `{name}` | " + " | ".join(f"{FIGURES[name][column]:.0e}" for column in COLUMNS) + " |")
        readme.write_text(before + begin + "\n".join(lines) + "\n" + end + after, encoding="utf-8")
        return
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in told.splitlines()[2:]]
    assert [row[0] for row in rows] == NAMES
    for name, *figures in rows:
        for column, figure in zip(COLUMNS, figures, strict=True):  # another processor rounds otherwise
            assert FIGURES[name][column] <= max(10 * float(figure), 1e-6), (name, column)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("gpt2", {"add_cross_attention": True}, "it attends to an encoder"),
        ("qkv_gpt2", {"variant": "q=k-v"}, "it is of variant q=k-v, and only qkv has"),
        ("qkv_gpt2", {"is_causal": False}, "it attends in both directions"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "it sees tokens both ways"),
        ("olmo", {"clip_qkv": 3.0}, "it clips queries, keys and values"),
    ],
)
def test_members_of_a_family_that_cannot_be_folded(
    tmp_path: Path, name: str, changes: dict[str, Any], says: str
) -> None:
    FAMILIES[name](**changes).save_pretrained(tmp_path / name)
    with pytest.raises(KvfoldError, match=says):
        convert(str(tmp_path / name), str(tmp_path / "out"), ConvertOptions(method="svd"))
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["Helium", "HunYuanDenseV1", "Exaone4"])
def test_families_with_almost_the_common_layout_are_refused(tmp_path: Path, name: str) -> None:
    """Neighbouring rotary pairs, norms after the rotation: silently taken for Llama they would come out broken."""
    config = getattr(transformers, f"{name}Config")(**SIZES)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path / name)
    with pytest.raises(KvfoldError, match=r"is not supported; supported: arcee, .*CONTRIBUTING"):
        convert(str(tmp_path / name), str(tmp_path / "out"), ConvertOptions(method="svd"))
