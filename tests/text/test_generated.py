"""Text that a model writes itself, and several texts together."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers import llama
from transformers import GPT2Config, GPT2LMHeadModel

from kvfold.model import KvfoldError
from kvfold.text import generated
from kvfold.text.generated import WRITTEN, Writer, write_chats, write_text
from kvfold.text.mixture import mixed_tokens, named_texts

TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture
def chatty(tokenizer: Any) -> Any:
    """A tokenizer with a chat template."""
    tokenizer.chat_template = TEMPLATE
    yield tokenizer
    tokenizer.chat_template = None


def short(model: Any, tokenizer: Any, seed: int) -> list[list[int]]:
    return write_chats(model, tokenizer, seed, message=7, reply=12, chats=6)


def test_text_is_written_reproducibly(tokenizer: Any) -> None:
    model = llama()
    state = torch.random.get_rng_state()
    one, again, other = (write_text(model, tokenizer, seed, length=30, documents=2) for seed in (5, 5, 6))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert one.shape == (2, 30)
    assert one[:, 0].tolist() == [tokenizer.bos_token_id] * 2
    assert torch.equal(state, torch.random.get_rng_state())


def test_chats_have_the_form_of_the_template(chatty: Any) -> None:
    model = llama()
    model.generation_config.eos_token_id = 7
    chats = short(model, chatty, 3)
    assert chats == short(model, chatty, 3)
    assert chats != short(model, chatty, 4)
    assert len({tuple(ids) for ids in chats}) > 1
    for ids in chats:
        text = chatty.decode(ids)
        asked, opened, _ = text.partition("\n<s>assistant:")
        assert opened
        assert asked.startswith("<s>user: ")
        assert asked != "<s>user: "


def test_a_reply_is_cut_at_its_end_and_sees_no_padding(chatty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    model.generation_config.eos_token_id = [7, 9]
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def written(ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        calls.append((ids, attention_mask))
        more = torch.tensor([[20, 21, 22, 23], [24, 9, 1, 1]]) if len(calls) == 2 else torch.tensor([[30], [31]])
        if len(calls) == 1:
            more = torch.tensor([[40, 41, 42], [43, 1, 1]])  # two messages of different lengths
        return torch.cat([ids, more], 1)

    monkeypatch.setattr(model, "generate", written)
    one, other = write_chats(model, chatty, 0, chats=2)
    assert one[-4:] == [20, 21, 22, 23]
    assert other[-2:] == [24, 9]
    ids, mask = calls[1]
    for row, seen, chat, reply in zip(ids, mask, (one, other), (4, 2), strict=True):
        assert row[seen.bool()].tolist() == chat[:-reply]
        assert seen.tolist() == sorted(seen.tolist())  # padded on the left
    assert mask.min() == 0


def test_models_that_cannot_chat(tokenizer: Any, chatty: Any) -> None:
    for template, says in (
        (None, "no chat template"),
        ("{{ raise_exception('only for tools') }}", "only for tools"),
        ("always the same", "leaves the user's message out"),
    ):
        chatty.chat_template = template
        with pytest.raises(KvfoldError, match=says):
            short(llama(), chatty, 0)
    chatty.chat_template = None
    with pytest.raises(KvfoldError, match="no chat template"):  # before the model is loaded
        Writer(lambda: pytest.fail("loaded"), chatty).documents("chat", 10)


def test_what_was_written_is_kept(tokenizer: Any, chatty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WRITTEN, "chat", short)
    first = Writer(llama, chatty, 1, "this one").documents("chat", 150)
    assert sum(map(len, first)) >= 150
    assert len({len(ids) for ids in first}) > 1
    never = Writer(lambda: pytest.fail("loaded"), chatty, 1, "this one")
    assert never.documents("chat", 150) == first
    assert never.documents("chat", 20) == first[:6]
    monkeypatch.setattr(generated, "cache_folder", lambda: Path("/proc/no/such"))
    assert Writer(llama, chatty, 1, "this one").documents("chat", 150) == first
    monkeypatch.undo()
    monkeypatch.setitem(WRITTEN, "chat", short)
    for seed, identity in ((2, "this one"), (1, "another"), (1, None)):
        made = Mock(side_effect=llama)
        Writer(made, chatty, seed, identity).documents("chat", 20)
        made.assert_called_once()


def test_every_window_has_its_share_of_each_text(tokenizer: Any, text_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("zebra " * 500)
    texts = named_texts([str(text_file), f"{other}:3"])
    whole = texts[0].source.tokens(tokenizer)
    zebras = set(texts[1].source.tokens(tokenizer).tolist())
    rows = mixed_tokens(texts, tokenizer, 330, 32).view(-1, 32)
    assert len(rows) == 10
    for number, row in enumerate(rows):
        assert torch.equal(row[:8], whole[8 * number : 8 * number + 8])
        assert set(row[8:].tolist()) <= zebras
    alone = named_texts([str(text_file)])
    assert torch.equal(mixed_tokens(alone, tokenizer, 330, 32), whole[:330])
    brief = tmp_path / "brief.txt"
    brief.write_text("zebra " * 20)
    few = mixed_tokens(named_texts([str(text_file), str(brief)]), tokenizer, 1024, 32)
    assert 0 < len(few) < 1024
    assert len(few) % 32 == 0
    for specs, says in (([f"{text_file}:0.001", str(other)], "weight"), ([], "no text")):
        with pytest.raises(KvfoldError, match=says):
            mixed_tokens(named_texts(specs), tokenizer, 330, 32)
    with pytest.raises(KvfoldError, match="too short"):
        mixed_tokens(named_texts([str(text_file), str(brief)]), tokenizer, 4096, 1024)


def test_models_of_few_positions_write_what_fits(chatty: Any) -> None:
    config = GPT2Config(vocab_size=320, n_positions=48, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    assert write_text(model, chatty, 0, documents=2).shape == (2, 48)
    assert all(len(ids) <= 48 for ids in write_chats(model, chatty, 0, chats=2))
    config.n_positions = 5
    with pytest.raises(KvfoldError, match="no chat fits into the model's 5 positions"):
        write_chats(GPT2LMHeadModel(config).eval(), chatty, 0, chats=2)


def test_a_model_that_cannot_write_says_so(tokenizer: Any) -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(KvfoldError, match=r"cannot write text: .*nan.*other text"):
        write_text(model, tokenizer, 0, length=8, documents=2)
