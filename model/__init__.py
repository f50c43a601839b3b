"""The folded architecture: config, attention, cache layers, and the model families it is built into.

Importing this package registers the folded classes with transformers' Auto classes. Its files travel inside every
converted checkpoint, so it imports torch, transformers and itself only.
"""

from .attention import AttentionTraits, FoldedAttention
from .cache import LatentLayer, LatentWindowLayer, StaticLatentLayer, StaticLatentWindowLayer
from .errors import KvfoldError
from .family import AttentionWeights, Family, families, family_of, is_folded, register, require_known
from .layout import FoldedLayout
from .llama import KvfoldLlamaConfig, KvfoldLlamaForCausalLM, KvfoldLlamaModel
from .mistral import KvfoldMistralConfig, KvfoldMistralForCausalLM, KvfoldMistralModel

__all__ = [
    "AttentionTraits",
    "AttentionWeights",
    "Family",
    "FoldedAttention",
    "FoldedLayout",
    "KvfoldError",
    "KvfoldLlamaConfig",
    "KvfoldLlamaForCausalLM",
    "KvfoldLlamaModel",
    "KvfoldMistralConfig",
    "KvfoldMistralForCausalLM",
    "KvfoldMistralModel",
    "LatentLayer",
    "LatentWindowLayer",
    "StaticLatentLayer",
    "StaticLatentWindowLayer",
    "families",
    "family_of",
    "is_folded",
    "register",
    "require_known",
]
