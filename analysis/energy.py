"""Keys and values of one layer, weighted by what errors in them do, as one joint signal.

Keys are weighted by the second moment of the queries that meet them (a logit error is q·δk), values by the output
blocks that read them. What a latent of width R can keep of the joint signal decides how well a layer folds, hence the
analysis and the closed-form conversion share this module. See "How the fold works" in the README.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..model import AttentionParts, AttentionTraits
from .moments import LayerMoments
from .rotation import QueryMoments

DEFAULT_BALANCE = 0.1
KEY_BLEND = 0.05  # share of plain moments in the key moments, so that no direction of the input counts for nothing
VALUE_BLEND = 0.05  # the same for the value moments
QUERY_FLOOR = 1e-3  # of the largest query moment: a direction no query of the calibration text used still counts
INPUT_PRIOR = 0.03  # of the mean input moment, in every direction: text of another kind will go where this one did not.
# On SmolLM2 it costs nothing on the kind of text that was calibrated on, and a quarter of the excess loss on others.
WHITE_TOKENS = 1024  # through a norm white inputs are sampled, there being no closed form
NO_DATA_DISTANCE = 512  # tokens; without text all distances up to here count alike


@dataclass(frozen=True)
class WeightedLayer:
    """One layer's keys and values as maps of the input x̃ = [x, 1], with the weights of their errors. All float64.

    Attributes:
        key, value: maps ``[KV, d, D + 1]``; the last column is the bias.
        queries: what M_k is made of. key_root, key_unroot: square root of M_k and its inverse, ``[KV, d, d]``.
        value_root, value_unroot: the same of M_v.
        moment_root: lower Cholesky factor of the second moment of x̃ in which the joint signal is measured,
            ``[D + 1, D + 1]``; None: white inputs. Everything works on factors: squaring would lose half of the digits.
        value_moment_roots: those of the moments on which value maps are fitted, one a pool (see ``moments.pool_of``).
        traits: the layer's properties.
    """

    key: torch.Tensor
    value: torch.Tensor
    queries: QueryMoments
    key_root: torch.Tensor
    key_unroot: torch.Tensor
    value_root: torch.Tensor
    value_unroot: torch.Tensor
    moment_root: torch.Tensor | None
    value_moment_roots: list[torch.Tensor | None]
    traits: AttentionTraits

    @property
    def heads(self) -> int:
        return self.key.shape[0]

    @property
    def head_dim(self) -> int:
        return self.key.shape[1]

    @property
    def mean(self) -> torch.Tensor:
        """E[x̃] in the moment of the joint signal, ``[D + 1]``."""
        if self.moment_root is None:
            return torch.eye(self.traits.width + 1, dtype=torch.float64)[-1]
        mean = self.moment_root @ self.moment_root[-1]
        return mean / mean[-1]

    def rotating(self, kept: torch.Tensor) -> WeightedLayer:
        """The same layer with only some frequency pairs rotated, ``kept`` bool ``[KV, P]``, the others turned for good.

        Its keys are weighted by the queries as they then are.
        """
        root, unroot = _roots(self.queries.as_keys_meet_them(kept), QUERY_FLOOR)
        return replace(self, key_root=root, key_unroot=unroot)

    def pair_costs(self) -> torch.Tensor:
        """Energy that the joint signal's keys lose for each frequency pair that is not rotated, ``[KV, P]``."""
        return self.queries.pair_costs(signal(self.key, self.moment_root).square().sum(-1))

    def joint(
        self, heads: list[int], balance: float, span: str = "all", centred_keys: bool = True
    ) -> tuple[torch.Tensor, float]:
        """J = [M_k^½ W_kᵀ; √(λ·scale) M_v^½ W_vᵀ] of some heads, ``[2·n·d, D + 1]``, and √(λ·scale).

        ``scale`` makes the energies of the layer's weighted keys and values equal, so that λ = ``balance`` says how
        much an error in the values counts against one in the keys. Where the latent has a bias, the means of the keys
        cost no direction of it, nor do those of the values where these may have a constant: they are left out
        (those of the keys only if ``centred_keys``).
        """
        keys, values = self.varying(span)
        keys = keys if centred_keys else self.key
        keys, values = self.key_root @ keys, self.value_root @ values
        key_size, value_size = (signal(part, self.moment_root).norm() for part in (keys, values))
        factor = float(balance**0.5 * key_size / value_size.clamp(min=1e-150))
        return torch.cat((keys[heads].flatten(0, 1), factor * values[heads].flatten(0, 1))), factor

    def varying(self, span: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values without the means that cost no direction of the latent, each ``[KV, d, D + 1]``."""
        key = self._centred(self.key) if self.traits.latent_bias else self.key
        return key, self._centred(self.value) if self.traits.value_constant(span) else self.value

    def rank(self, span: str) -> int:
        """Directions that the joint signal of any heads can have, apart from its number of rows.

        Maps of x, or of x less its mean, have at most D; a mixture of both has one more.
        """
        return self.traits.width + (self.traits.latent_bias and not self.traits.value_constant(span))

    def _centred(self, maps: torch.Tensor) -> torch.Tensor:
        """Maps of x̃ whose mean is taken off."""
        centred = maps.clone()
        centred[..., -1] -= maps @ self.mean
        return centred

    def spectrum(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Energies of a joint signal ``rows`` (of ``joint``), largest first, and their directions in columns.

        There are ``min(2·n·d, D + 1)`` of them.
        """
        directions, sizes, _ = torch.linalg.svd(signal(rows, self.moment_root), full_matrices=False)
        return sizes.square(), directions

    def head_groups(self, span: str) -> list[list[int]]:
        """Heads that share a latent: all of them together, or each alone (span ``head``)."""
        return [list(range(self.heads))] if span == "all" else [[head] for head in range(self.heads)]

    def kept_shares(self, widths: list[int], span: str, balance: float = DEFAULT_BALANCE) -> list[float]:
        """Share of the joint energy that latents of these widths keep (span ``head``: equally many columns a head)."""
        groups = self.head_groups(span)
        energies = [self.spectrum(self.joint(group, balance, span)[0])[0] for group in groups]
        total = sum(float(part.sum()) for part in energies)
        if total == 0:
            return [1.0] * len(widths)  # there is nothing to lose
        return [sum(float(part[: width // len(groups)].sum()) for part in energies) / total for width in widths]


def signal(maps: torch.Tensor, moment_root: torch.Tensor | None) -> torch.Tensor:
    """Maps of x̃ ``[..., D + 1]`` times the factor of its second moment (None: the identity)."""
    return maps if moment_root is None else maps @ moment_root


def weigh(parts: AttentionParts, moments: LayerMoments | None) -> WeightedLayer:
    """Weigh a layer's keys and values.

    Args:
        parts: the layer. moments: statistics of calibration text; None: white inputs stand for no data.
    """
    traits, weights = parts.traits, parts.weights
    kv, d, group = traits.key_value_heads, traits.head_dim, traits.query_heads // traits.key_value_heads
    moment_root: torch.Tensor | None = None
    value_moment_roots: list[torch.Tensor | None] = [None]
    if moments is None:
        distances = torch.full((kv, NO_DATA_DISTANCE), 1 / NO_DATA_DISTANCE, dtype=torch.float64)
        query_moment, gains = _white_moments(parts)
    else:
        query_moment, gains, distances = moments.queries, moments.gains, moments.distances
        moment_root = _factor((1 - KEY_BLEND) * moments.keys + KEY_BLEND * moments.inputs)
        value_moment_roots = [
            _factor((1 - VALUE_BLEND) * moment + VALUE_BLEND * moments.inputs) for moment in moments.values
        ]
    queries = QueryMoments(
        query_moment,
        gains,
        distances,
        None if parts.frequencies is None else parts.frequencies.double().cpu(),
        parts.rotary_scale**2,
        traits.query_norm or traits.key_norm,
    )
    blocks = weights.o.detach().chunk(kv, dim=1)
    value_moment = torch.stack([_output_moment(block, d) for block in blocks]) / group
    key_root, key_unroot = _roots(queries.as_keys_meet_them(), QUERY_FLOOR)
    value_root, value_unroot = _roots(value_moment, 1e-12)
    return WeightedLayer(
        key=_with_bias(weights.k, weights.k_bias).view(kv, d, -1),
        value=_with_bias(weights.v, weights.v_bias).view(kv, d, -1),
        queries=queries,
        key_root=key_root,
        key_unroot=key_unroot,
        value_root=value_root,
        value_unroot=value_unroot,
        moment_root=moment_root,
        value_moment_roots=value_moment_roots,
        traits=traits,
    )


@torch.no_grad()
def _white_moments(parts: AttentionParts) -> tuple[torch.Tensor, torch.Tensor]:
    """E[qᵀq] of each KV head's queries, ``[KV, d, d]``, and the key norm's gains ``[KV, d]``, for white inputs."""
    traits = parts.traits
    kv, d, group = traits.key_value_heads, traits.head_dim, traits.query_heads // traits.key_value_heads
    gains = torch.ones(kv, d, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, WHITE_TOKENS, traits.width, generator=generator).to(parts.weights.q.device)
    if parts.key_norm is not None:
        before, after = (parts.keys(x, normed=normed).double().cpu().square().sum((0, 2)) for normed in (False, True))
        gains = (after / before.clamp(min=1e-300)).sqrt()
    if parts.query_norm is not None:
        queries = parts.queries(x).double().cpu().reshape(kv, -1, d)
        return queries.transpose(1, 2) @ queries / queries.shape[1], gains
    biases = parts.weights.q_bias.chunk(kv) if parts.weights.q_bias is not None else [None] * kv
    moments = []
    for weight, bias in zip(parts.weights.q.chunk(kv), biases, strict=True):
        query = _with_bias(weight, bias).view(group, d, -1)
        moments.append((query @ query.transpose(-1, -2)).mean(0))
    return torch.stack(moments), gains


def _output_moment(block: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Σ_j W_o^j W_o^jᵀ ``[d, d]`` of the columns ``[D, group·d]`` of the output projection that read one KV head."""
    outputs = block.double().cpu().unflatten(1, (-1, head_dim))  # [D, group, d]
    return torch.einsum("igd,ige->de", outputs, outputs)


def _roots(moment: torch.Tensor, floor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric square roots and their inverses of ``[n, d, d]``, eigenvalues raised by ``floor`` of the largest."""
    energies, basis = torch.linalg.eigh((moment + moment.transpose(1, 2)) / 2)
    root = (energies.clamp(min=0) + floor * energies.amax(-1, keepdim=True).clamp(min=1e-300)).sqrt()
    return (basis * root[:, None]) @ basis.transpose(1, 2), (basis / root[:, None]) @ basis.transpose(1, 2)


def _factor(moment: torch.Tensor) -> torch.Tensor:
    """Lower Cholesky factor of ``[n, n]``, its diagonal raised (see ``INPUT_PRIOR``)."""
    prior = INPUT_PRIOR * moment.diagonal().mean()
    return torch.linalg.cholesky(moment + prior * torch.eye(len(moment), dtype=moment.dtype))


def _with_bias(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``[out, D + 1]`` in float64: the map of x̃ = [x, 1]."""
    weight = weight.detach().double().cpu()
    column = weight.new_zeros(len(weight)) if bias is None else bias.detach().double().cpu()
    return torch.cat((weight, column[:, None]), dim=1)
