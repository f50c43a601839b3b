"""How rotated queries meet keys: moments over distances, and what it would cost to leave a frequency pair unrotated.

RoPE makes a score q·R_Δᵀk of a query and a key that lie Δ tokens apart. With the two members of a frequency pair as one
complex number, pair f of the query is turned by e^{iθ_f Δ}. A pair that is left unrotated can keep the mean of that,
c_f = E[e^{iθ_f Δ}], as a factor on the query; what is lost is 1 − |c_f|² of the pair's energy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class QueryMoments:
    """Second moments of the queries that meet each KV head's keys. All float64.

    Attributes:
        moment: E[qᵀq], normed, not rotated, ``[KV, d, d]``.
        gains: how much the key norm enlarges each number of a key, ``[KV, d]``.
        distances: weights of the distances at which they meet, ``[KV, T]``, sum 1.
        frequencies: RoPE's angles per token, ``[P]``; None: no RoPE.
        scale: factor that RoPE puts on rotated queries and keys together (1 but for yarn and longrope).
        normed: whether a norm stands between the projections and the scores; then pairs cannot be turned for good.
    """

    moment: torch.Tensor
    gains: torch.Tensor
    distances: torch.Tensor
    frequencies: torch.Tensor | None
    scale: float = 1.0
    normed: bool = False

    @property
    def pairs(self) -> int:
        """P, the frequency pairs that RoPE rotates in a head."""
        return 0 if self.frequencies is None else len(self.frequencies)

    def turns(self) -> torch.Tensor:
        """What a query's pairs are to be multiplied with where they are not rotated, complex ``[KV, P]``."""
        mean = self._mean_turns()
        return torch.full_like(mean, self.scale) if self.normed else mean

    def _mean_turns(self) -> torch.Tensor:
        """scale · E[e^{iθΔ}], complex ``[KV, P]``."""
        if self.frequencies is None:
            return torch.zeros(len(self.moment), 0, dtype=torch.complex128)
        return self.scale * (self.distances + 0j) @ torch.exp(1j * self._angles())

    def as_keys_meet_them(self, kept: torch.Tensor | None = None) -> torch.Tensor:
        """E[(R_Δ q)(R_Δ q)ᵀ] ``[KV, d, d]``: the moment of the queries as an unrotated key meets them.

        Args:
            kept: which pairs are rotated, bool ``[KV, P]``; None: all of them. The others are turned by ``turns``.

        R_Δ has cosines on its diagonal and sines between the two members of a pair, so only their means and products
        over Δ are needed.
        """
        turned = self.moment
        if self.frequencies is not None:
            factors = self.scale * torch.exp(1j * self._angles()).expand(len(self.moment), -1, -1)
            if kept is not None:
                factors = torch.where(kept[:, None], factors, self.turns()[:, None])
            heads = zip(self.moment, factors, self.distances, strict=True)
            turned = torch.stack([_mean_turned(*head) for head in heads])
        return self.gains[:, :, None] * turned * self.gains[:, None]

    def pair_costs(self, key_energies: torch.Tensor) -> torch.Tensor:
        """Weighted energy of the score errors if a pair were not rotated, ``[KV, P]``, in units of the joint signal.

        Args:
            key_energies: E[k²] of every dimension of the keys, ``[KV, d]``.
        """
        meant = self.moment.diagonal(dim1=1, dim2=2)
        queries, keys = (_by_pair(part, self.pairs) for part in (meant, self.gains.square() * key_energies))
        # E|scale · e^{iθΔ} − turn|², which is scale² − |turn|² where the turn is the mean.
        turns = self.turns()
        lost = self.scale**2 + turns.abs().square() - 2 * (turns.conj() * self._mean_turns()).real
        return keys * queries / 2 * lost.clamp(min=0)

    def _angles(self) -> torch.Tensor:
        assert self.frequencies is not None
        return torch.arange(self.distances.shape[1], dtype=torch.float64)[:, None] * self.frequencies


def _by_pair(each: torch.Tensor, pairs: int) -> torch.Tensor:
    return each[:, :pairs] + each[:, pairs : 2 * pairs]


def _mean_turned(moment: torch.Tensor, factors: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """E[(R q)(R q)ᵀ] of one head; R multiplies the query's pairs with ``factors`` ``[T, P]``, weighted ``[T]``."""
    d, pairs = len(moment), factors.shape[1]
    still = factors.real.new_ones(len(factors), d - 2 * pairs)  # dimensions that never turn
    cos = torch.cat((factors.real, factors.real, still), dim=1)  # [T, d]
    sin = torch.cat((-factors.imag, factors.imag, 0 * still), dim=1)
    partner = torch.tensor([*range(pairs, 2 * pairs), *range(pairs), *range(2 * pairs, d)])
    # (R q)_i = cos_i q_i + sin_i q_partner(i)
    weighted_cos, weighted_sin = weights[:, None] * cos, weights[:, None] * sin
    mixed = (weighted_cos.T @ sin) * moment[:, partner]
    turned = (weighted_cos.T @ cos) * moment + mixed + mixed.T
    return turned + (weighted_sin.T @ sin) * moment[partner][:, partner]
