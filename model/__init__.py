"""The folded architecture: config, attention, cache layers, and the model families it is built into.

Importing this package registers the folded classes with transformers' Auto classes. Its files travel inside every
converted checkpoint, so it imports torch, transformers and itself only.
"""

from importlib import import_module

from .attention import FoldedAttention
from .cache import LatentLayer, LatentWindowLayer, StaticLatentLayer, StaticLatentWindowLayer
from .errors import KvfoldError
from .family import AttentionParts, Family, families, family_of, family_to_fold, is_folded, register, require_known
from .layout import FoldedLayout
from .projections import AttentionWeights
from .traits import AttentionTraits
from .variant_attention import VariantAttention
from .variants import VARIANTS, Variant, variant_named

# Each of these files registers its family when it is imported.
FAMILY_FILES = (
    "arcee",
    "cohere",
    "cohere2",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granitemoe",
    "llama",
    "ministral",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmo3",
    "opt",
    "phi",
    "phi3",
    "qkv_gpt2",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
)
for _name in FAMILY_FILES:
    import_module(f".{_name}", __name__)

__all__ = [
    "FAMILY_FILES",
    "VARIANTS",
    "AttentionParts",
    "AttentionTraits",
    "AttentionWeights",
    "Family",
    "FoldedAttention",
    "FoldedLayout",
    "KvfoldError",
    "LatentLayer",
    "LatentWindowLayer",
    "StaticLatentLayer",
    "StaticLatentWindowLayer",
    "Variant",
    "VariantAttention",
    "families",
    "family_of",
    "family_to_fold",
    "is_folded",
    "register",
    "require_known",
    "variant_named",
]
