"""A native export runs in another engine: llama.cpp, from a GGUF file written here, says the same tokens.

pip install llama-cpp-python
python -m pytest -m slow tests/convert/test_engine.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.checkpoint.sample_model import fetch
from kvfold.convert.conversion import convert
from kvfold.convert.export import ExportOptions, export
from kvfold.convert.options import ConvertOptions

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def neighbouring_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbours (2i, 2i + 1) of a head, transformers members half a head apart."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(folder: Path, path: Path) -> None:
    """Write a Llama checkpoint as a GGUF file in float32, with its byte-level BPE."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, folder, config.vocab_size)

    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    if not config.tie_word_embeddings:
        writer.add_tensor("output.weight", state["lm_head.weight"])
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            if ours in heads:
                weight = neighbouring_pairs(weight, heads[ours])
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, size: int) -> None:
    bpe = json.loads((folder / "tokenizer.json").read_text())
    tokens = {index: token for token, index in bpe["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in bpe["added_tokens"]}
    listed = [special.get(index) or tokens.get(index, f"[unused{index}]") for index in range(size)]
    kinds = [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in range(size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(listed)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)


@pytest.mark.slow
def test_llama_cpp_says_the_same(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    options = ConvertOptions(calibrate=("docs",), calibrate_tokens=4096, balance=0.1)
    convert(str(fetch()), str(tmp_path / "folded"), options)
    export(str(tmp_path / "folded"), str(tmp_path / "plain"), ExportOptions())
    write_gguf(tmp_path / "plain", tmp_path / "plain.gguf")

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folded")
    folded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "folded").eval()
    engine = llama_cpp.Llama(str(tmp_path / "plain.gguf"), n_ctx=256, verbose=False)
    for prompt in ("The capital of France is", "def fibonacci(n):", "Water boils at"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = folded.generate(ids, do_sample=False, max_new_tokens=24, min_new_tokens=24)[0, ids.shape[1] :]
        found = []
        for token in engine.generate(ids[0].tolist(), temp=0.0, repeat_penalty=1.0, reset=True):
            found.append(token)
            if len(found) == 24:
                break
        assert found == expected.tolist(), prompt
