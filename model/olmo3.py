"""OLMo 3: OLMo 2 with a sliding window in most layers."""

from transformers import Olmo3Config, Olmo3ForCausalLM, Olmo3Model

from .family import Family, register
from .olmo2 import traits

OLMO3 = register(Family(__name__, Olmo3Config, Olmo3Model, Olmo3ForCausalLM, traits))
