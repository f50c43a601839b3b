"""SmolLM 3: some layers do not rotate."""

from __future__ import annotations

from typing import Any

from transformers import SmolLM3Config, SmolLM3ForCausalLM, SmolLM3Model

from .family import Family, register
from .traits import AttentionTraits, separate


def traits(attention: Any, config: Any, layer: int) -> AttentionTraits:
    return separate(attention, config, layer, rotary_dim=attention.head_dim if attention.use_rope else 0)


SMOLLM3 = register(Family(__name__, SmolLM3Config, SmolLM3Model, SmolLM3ForCausalLM, traits))
