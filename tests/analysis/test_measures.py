"""The analysis against what the same figures are by definition."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import llama, with_layouts
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.analysis import divergence
from kvfold.analysis.energy import weigh
from kvfold.analysis.moments import collect_moments
from kvfold.analysis.perplexity import cache_bytes_per_token, evaluate
from kvfold.analysis.redundancy import analyze
from kvfold.analysis.report import Section, Table, write_report
from kvfold.cli import main
from kvfold.model import FoldedLayout, KvfoldError, family_of
from kvfold.text import sources
from kvfold.text.sources import CALIBRATE, EVALUATE, TextSource, python_manual


@torch.no_grad()
def test_moments_by_their_definition(ids: torch.Tensor) -> None:
    model = llama()
    found = collect_moments(model, ids)[1]
    model.set_attn_implementation("eager")
    seen: dict[str, Any] = {}
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    weights = model(ids, output_attentions=True).attentions[1].double()
    x = seen["hidden_states"].double()
    x1 = torch.cat((x, torch.ones(2, 20, 1)), dim=-1)
    values = (x @ attention.v_proj.weight.double().T).view(2, 20, 2, 8)
    blocks = attention.o_proj.weight.double().view(48, 6, 8)
    inputs, keys = torch.zeros(49, 49).double(), torch.zeros(49, 49).double()
    averaged, distances = torch.zeros(2, 49, 49).double(), torch.zeros(2, 20).double()
    for b in range(2):
        for k in range(20):
            inputs += torch.outer(x1[b, k], x1[b, k])
        for j in range(6):
            shown = values[b, :, j // 3] @ blocks[:, j].T  # what each value adds to the output, [20, 48]
            for q in range(20):
                mean = weights[b, j, q] @ x1[b]
                averaged[j // 3] += torch.outer(mean, mean)
                out = weights[b, j, q] @ shown
                for k in range(q + 1):
                    effect = weights[b, j, q, k] ** 2 * (shown[k] - out).square().sum()
                    keys += effect * torch.outer(x1[b, k], x1[b, k])
                    distances[j // 3, q - k] += effect
    assert torch.allclose(found.inputs, inputs / inputs[-1, -1], rtol=1e-4, atol=1e-5)
    assert torch.allclose(found.keys, keys / keys[-1, -1], rtol=1e-3, atol=1e-4)
    assert torch.allclose(found.values, averaged / averaged[:, -1:, -1:], rtol=1e-4, atol=1e-5)
    assert torch.allclose(found.distances, distances / distances.sum(1, keepdim=True), rtol=1e-3, atol=1e-5)


def test_divergences_by_their_definition_however_few_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    source, *changed = (torch.randn(3, 2, 7, 50, generator=random) for _ in range(3))  # three batches each
    p = source.double().softmax(-1)
    expected = [float((p * (p.log() - other.double().log_softmax(-1))).sum() / 42) for other in changed]
    for entries in (1, 4 * 50, 1 << 22):
        monkeypatch.setattr(divergence, "LOGITS_AT_ONCE", entries)
        rows: list[int] = []
        assert divergence.divergences(source, changed, rows.append) == pytest.approx(expected, rel=1e-5)
        assert rows == [2, 2, 2]


@torch.no_grad()
def test_kept_energy_is_the_best_possible_and_reaches_one(ids: torch.Tensor) -> None:
    model = llama()
    family = family_of(model.config)
    moments = collect_moments(model, ids)
    weighted = [weigh(family.parts_of(model, layer), moments[layer]) for layer in range(len(moments))]
    for layer in weighted:
        widths = [16, 20, 24, 28, 32]
        every, alone = layer.kept_shares(widths, "all"), layer.kept_shares(widths, "head")
        assert every == sorted(every)
        assert all(a >= b - 1e-12 for a, b in zip(every, alone, strict=True))
        assert math.isclose(every[-1], 1)
        # Eckart–Young: no 16 directions keep more of the joint signal than the spectrum says.
        rows, _ = layer.joint([0, 1], 0.1)
        assert layer.moment_root is not None
        signal = rows @ layer.moment_root
        other, _ = torch.linalg.qr(torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).double())
        assert float((other.T @ signal).square().sum() / signal.square().sum()) < every[0]


@torch.no_grad()
def test_redundancy_of_known_weights(ids: torch.Tensor) -> None:
    model = llama()
    turn, _ = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    for index, layer in enumerate(model.model.layers):
        k, v = layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight
        if index == 0:
            v.copy_(k)  # the same
        elif index == 1:
            v.copy_((turn @ k.view(2, 8, 48)).reshape(16, 48))  # turned within the head
        else:
            v.zero_()
            v[:8, :8] = torch.eye(8)  # rank 8 and 0
    layers = analyze(model, collect_moments(model, ids))
    same, turned, sparse = layers
    assert math.isclose(same.cosine, 1, rel_tol=1e-6)
    for head in same.heads:
        assert head.cosine == pytest.approx(1)
        assert head.cka == pytest.approx(1)
        assert head.key_rank == pytest.approx(head.value_rank)
    for head in turned.heads:
        assert abs(head.cosine) < 0.6
        assert head.aligned_cosine == pytest.approx(1)
        assert head.principal_cosine == pytest.approx(1)
        assert head.cka == pytest.approx(1)
    assert sparse.heads[0].value_rank == pytest.approx(8)
    assert sparse.heads[1].value_rank == 0
    assert same.kept_head[0] == pytest.approx(1)
    assert turned.kept_head[0] == pytest.approx(1)


@torch.no_grad()
def test_perplexity_by_definition(source: Path, folded: Path, text_file: Path) -> None:
    results = evaluate([str(source), str(folded)], str(text_file), 40, 3)
    tokens = AutoTokenizer.from_pretrained(source)(text_file.read_text()).input_ids[:120]
    for path, result in zip((source, folded), results, strict=True):
        model = AutoModelForCausalLM.from_pretrained(path).eval()
        losses = []
        for row in torch.tensor(tokens).view(3, 40):
            logits = model(row[None]).logits[0, :-1].double().log_softmax(-1)
            losses.append(-logits.gather(1, row[1:, None]))
        assert math.isclose(result.perplexity, float(torch.cat(losses).mean().exp()), rel_tol=1e-5)
        assert result.tokens == 3 * 39
        assert result.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert results[0].cache_bytes_per_token == 3 * 2 * 16 * 4
    assert [result.cache_fraction for result in results] == [1.0, 0.5]


def test_cache_bytes_follow_the_layouts(ids: torch.Tensor) -> None:
    layouts = [FoldedLayout(16, 2, 2), FoldedLayout(24, 2, 2), FoldedLayout(9, 2, 2, rotary_pairs=((), (1,)))]
    model = with_layouts(llama(), layouts)
    assert cache_bytes_per_token(model, ids[0]) == (16 + 24 + 9) * 4
    assert cache_bytes_per_token(model.bfloat16(), ids[0]) == (16 + 24 + 9) * 2


def test_text_sources(tmp_path: Path, tokenizer: Any, text_file: Path) -> None:
    documents = ["One two three.", "Four five six."]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    import pandas

    pandas.DataFrame({"body": documents}).to_parquet(tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        assert tokenizer.decode(TextSource(str(tmp_path / name)).tokens(tokenizer)) == "\n\n".join(documents)
    whole = TextSource(str(text_file)).tokens(tokenizer)
    assert torch.equal(TextSource(str(text_file)).tokens(tokenizer, 50), whole[:50])
    dense = tmp_path / "dense.txt"  # tokens longer than any text's: the limited read is too short at first
    dense.write_text(text_file.read_text())
    assert len(TextSource(str(dense)).tokens(tokenizer, len(whole))) == len(whole)
    first, second = ("\n\n".join(python_manual(purpose)) for purpose in (CALIBRATE, EVALUATE))
    assert abs(len(first) - len(second)) < 0.2 * len(first)
    assert first[-500:] not in second
    with pytest.raises(KvfoldError):
        TextSource("self").tokens(tokenizer)


def test_report_is_self_contained(tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, _ = plt.subplots()
    section = Section("A <title>", ["text"], Table(["a"], [["<b>"]]), [("plot", figure)], [("name", "x & y")])
    write_report(tmp_path / "report.html", "Report", [section])
    page = (tmp_path / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert "A &lt;title&gt;" in page
    assert "x &amp; y" in page
    assert "http" not in page


def test_analyze_writes_tables_and_plots(
    source: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--calibrate", str(text_file), "--calibrate-tokens", "512", "--calibrate-window", "64"]
    outputs = ["--out", str(tmp_path / "analysis"), "--json", str(tmp_path / "analysis.json")]
    monkeypatch.setattr("sys.argv", ["kvfold", "analyze", str(source), *arguments, *outputs])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert not exit_.value.code
    assert "CKA" in capsys.readouterr().out
    written = {path.name: path for path in (tmp_path / "analysis").iterdir()}
    assert {"heads.csv", "energy.csv", "cosine.png", "aligned_cosine.png", "cka.png", "lost_energy.png"} <= set(written)
    assert all(written[name].read_bytes()[:4] == b"\x89PNG" for name in written if name.endswith(".png"))
    rows = list(csv.DictReader(written["heads.csv"].open()))
    data = json.loads((tmp_path / "analysis.json").read_text())
    assert len(rows) == 6
    assert np.isclose(float(rows[3]["cosine"]), data["layers"][1]["heads"][1]["cosine"])


def test_large_text_files_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "TXT_PIECE", 100)
    lines = [f"Line {number} of é {'x' * (number % 70)}\n" for number in range(40)]
    path = tmp_path / "large.txt"
    path.write_text("".join(lines) + "the end", encoding="utf-8")
    pieces = list(TextSource(str(path)).documents())
    assert "".join(pieces) == path.read_text(encoding="utf-8")
    assert all(piece.endswith("\n") and len(piece) >= 100 for piece in pieces[:-1])
    assert len("".join(TextSource(str(path)).documents(250))) == 250
    path.write_bytes("".join(lines).encode() + b"caf\xe9\n")
    with pytest.raises(KvfoldError, match="line 41, byte 4 cannot be read"):
        list(TextSource(str(path)).documents())
