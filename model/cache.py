"""Cache layers that keep one latent tensor a layer, and nothing else.

transformers builds the cache of ``generate`` from the config's ``layer_types``; the names below are registered
there, so that a folded model needs no cache argument and no override of ``generate``. A layer presents the latent as
its ``keys`` ``[batch, 1, tokens, R]`` and an empty tensor ``[batch, 1, tokens, 0]`` as its ``values``.

Latents are stored before rotation, hence whoever reads them must know each token's position. All layers hold the same
tokens, so the first layer of each kind keeps the positions for all of them (4 bytes a token for the whole model).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

LAYER_TYPE = "kvfold_latent"
BLOCK = 256  # tokens; the least by which a growing buffer grows


class GrowingTensor:
    """A tensor ``[batch, 1, tokens, width]`` that tokens are appended to, in a buffer that grows in blocks.

    Growing by at least an eighth makes the copies amount to a constant number per token, however long the text.
    """

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None
        self.start = 0
        self.stop = 0

    def view(self) -> torch.Tensor | None:
        """The tokens held, as a view of the buffer (None before the first append)."""
        return None if self.buffer is None else self.buffer[:, :, self.start : self.stop]

    def replace(self, tensor: torch.Tensor | None) -> None:
        """Hold ``tensor`` from now on; it becomes the buffer, so it must not be written elsewhere."""
        self.buffer, self.start = tensor, 0
        self.stop = 0 if tensor is None else tensor.shape[-2]

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """Append ``new`` and return the view of all tokens held."""
        held = self.view()
        if held is None or (held.shape[-2] == 0 and held.shape[:2] != new.shape[:2]):
            held = new[:, :, :0]
            self.buffer, self.start, self.stop = held, 0, 0
        if torch.is_grad_enabled() and (new.requires_grad or held.requires_grad):
            # Autograd would see the buffer change under it (prefix tuning, training through a cache).
            joined = torch.cat([held, new], dim=-2)
            self.replace(joined)
            return joined
        buffer, first = self.buffer, self.stop
        if buffer is None or first + new.shape[-2] > buffer.shape[-2]:
            buffer, first = self._grown(held, new), held.shape[-2]
            self.buffer, self.start = buffer, 0
        self.stop = first + new.shape[-2]
        buffer[:, :, first : self.stop] = new
        return buffer[:, :, self.start : self.stop]

    @staticmethod
    def _grown(held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """A buffer that begins with ``held`` and has room for ``new`` and more."""
        batch, heads, tokens, width = new.shape
        total = held.shape[-2] + tokens
        buffer = new.new_empty((batch, heads, total + max(BLOCK, total // 8), width))
        buffer[:, :, : held.shape[-2]] = held
        return buffer

    def drop_first(self, tokens: int) -> None:
        """Forget the oldest ``tokens`` tokens (their room is given back at the next growth)."""
        self.start = min(self.stop, self.start + tokens)

    def drop_last(self, tokens: int) -> None:
        """Forget the newest ``tokens`` tokens."""
        self.stop = max(self.start, self.stop - tokens)

    def change(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``function`` to the whole buffer (a move to another device, a choice of rows)."""
        if self.buffer is not None:
            self.buffer = function(self.buffer)


class _Growing(DynamicLayer):
    """Storage of the growing layers: ``keys`` is a view of one buffer, ``values`` an empty one."""

    def __init__(self, **kwargs: Any) -> None:
        self._tokens = GrowingTensor()
        super().__init__(**kwargs)

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        return self._tokens.view()

    @keys.setter
    def keys(self, tensor: torch.Tensor | None) -> None:
        self._tokens.replace(tensor)

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        keys = self._tokens.view()
        return None if keys is None else keys[..., :0]

    @values.setter
    def values(self, tensor: torch.Tensor | None) -> None:
        """Nothing to keep: values are read out of the latent."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self._tokens.replace(key_states[:, :, :0])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held = self._tokens.append(key_states)
        return held, held[..., :0]

    def get_seq_length(self) -> int:
        return self._tokens.stop - self._tokens.start if self.is_initialized else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens (negative, as transformers passes it)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, not {tokens_to_remove}")
        self._tokens.drop_last(-tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._tokens.change(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._tokens.change(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._tokens.change(lambda tensor: tensor[indices, ...])

    def offload(self) -> None:
        self._tokens.change(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._tokens.change(lambda tensor: tensor.to(self.device, non_blocking=True))


class _GrowingWindow(_Growing, DynamicSlidingWindowLayer):
    """The same for a sliding window of W tokens: the last W - 1 are kept (all, while the past is recorded)."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        held, _ = super().update(key_states, value_states)
        new = key_states.shape[-2]
        self.cumulative_length += new
        # What the mask was told to expect (get_mask_sizes): the window before the first new token, and the new ones.
        visible = held[:, :, -(self.sliding_window - 1 + new) :]
        if not self.record_past:
            self._forget_beyond_window()
        return visible, visible[..., :0]

    def _forget_beyond_window(self) -> None:
        self._tokens.drop_first(max(0, super().get_seq_length() - (self.sliding_window - 1)))

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, and what has left the window.

        Raises RuntimeError when tokens that the window needs again were forgotten already (see
        ``activate_past_recording``).
        """
        if self.cumulative_length >= self.sliding_window and not self.record_past and tokens_to_remove:
            raise RuntimeError("a full sliding window can only be cropped while it records the past")
        super().crop(tokens_to_remove)
        self.cumulative_length += tokens_to_remove
        self._forget_beyond_window()


class _PositionKeeper(CacheLayerMixin):
    """Lets a cache layer keep token positions in a second layer of its kind that follows whatever befalls the first."""

    storage: type[CacheLayerMixin]
    # transformers would allocate by the config's heads and head_dim, which say nothing of the latent's width.
    supports_early_init = False
    positions: torch.Tensor | None = None
    """Positions ``[batch, 1, tokens, 1]`` (int32) of the tokens that the last ``update`` returned, if kept here."""

    def __init__(self, **kwargs: Any) -> None:
        self._kind = kwargs
        self._position_layer: Any = None
        super().__init__(**kwargs)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        positions: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append latents ``[batch, 1, new, R]`` and return all; keep ``positions`` ``[batch, 1, new, 1]``, too."""
        if positions is not None:
            if self._position_layer is None:
                self._position_layer = self.storage(**self._kind)
                if getattr(self, "record_past", False):
                    self._position_layer.activate_past_recording()
            self.positions, _ = self._position_layer.update(positions, positions[..., :0])
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[safe-super]

    def _follow(self, operation: str, *args: Any) -> None:
        getattr(super(), operation)(*args)
        if self._position_layer is not None:
            getattr(self._position_layer, operation)(*args)

    def reset(self) -> None:
        self._follow("reset")
        self.positions = None

    def crop(self, tokens_to_remove: int) -> None:
        self._follow("crop", tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._follow("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._follow("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._follow("batch_select_indices", indices)


class LatentLayer(_PositionKeeper, _Growing):
    """The cache layer of a folded attention layer."""

    storage = _Growing


class LatentWindowLayer(_PositionKeeper, _GrowingWindow):
    """The cache layer of a folded attention layer with a sliding window."""

    storage = _GrowingWindow

    def activate_past_recording(self) -> None:
        self._follow("activate_past_recording")


class StaticLatentLayer(_PositionKeeper, StaticLayer):
    """``LatentLayer`` of a fixed size (``cache_implementation="static"``)."""

    storage = StaticLayer


class StaticLatentWindowLayer(_PositionKeeper, StaticSlidingWindowLayer):
    """``LatentWindowLayer`` of a fixed size."""

    storage = StaticSlidingWindowLayer


def latent_layer_type(sliding_window: int | None) -> str:
    """The name for a config's ``layer_types``, registered with transformers' caches.

    transformers hands a window's size only to layer types of its own, so each size is a type here.
    """
    if sliding_window is None:
        DYNAMIC_LAYER_TYPE_MAPPING[LAYER_TYPE] = LatentLayer
        STATIC_LAYER_TYPE_MAPPING[LAYER_TYPE] = StaticLatentLayer
        return LAYER_TYPE
    name = f"{LAYER_TYPE}_{sliding_window}"
    DYNAMIC_LAYER_TYPE_MAPPING[name] = partial(LatentWindowLayer, sliding_window=sliding_window)  # type: ignore[assignment]
    STATIC_LAYER_TYPE_MAPPING[name] = partial(StaticLatentWindowLayer, sliding_window=sliding_window)  # type: ignore[assignment]
    return name
