"""Checkpoints in: a folder, a Hub id or a GGUF file becomes a transformers model and its tokenizer."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from ..model import KvfoldError, family_of, is_folded, require_known
from ..model.errors import one_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Checkpoint:
    """A loaded model, ready to be read or run.

    Attributes:
        path: what the user gave. model: in evaluation mode. tokenizer: None where the folder has none.
        folder: the local folder the weights came from (None for a Hub id).
    """

    path: str
    model: Any
    tokenizer: Any
    folder: Path | None

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config


def load(path: str, dtype: str = "auto", device: str = "cpu") -> Checkpoint:
    """Load MODEL, checked: every tensor there, finite, of the right shape.

    Args:
        path: folder, Hub id or ``.gguf`` file. dtype: ``auto`` (as stored) or a key of ``DTYPES``.
        device: torch device.

    Raises:
        KvfoldError: for anything about the checkpoint that is wrong.
    """
    folder, gguf = _locate(path)
    torch_dtype: Any = "auto" if dtype == "auto" else _dtype(dtype)
    where: dict[str, Any] = {}
    if gguf:
        where["gguf_file"] = gguf
        torch_dtype = torch.float32 if dtype == "auto" else torch_dtype
    name = str(folder) if folder else path
    if folder and not gguf:
        _check_weight_files(folder)
    with _one_line(path if folder else f"{path} (no such folder here; as a Hub id)"), quiet(), _no_bar(gguf):
        _check_family(name, where)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=torch_dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            trust_remote_code=False,
            **where,
            **({} if gguf else {"use_safetensors": True}),
        )
    model, info = loaded
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise KvfoldError(f"{path}: {len(missing)} tensors are missing from the weights, first {missing[0]}")
    if info["mismatched_keys"]:
        key, stored, expected = sorted(info["mismatched_keys"])[0]
        raise KvfoldError(f"{path}: weight {key} has shape {list(stored)}, the config says {list(expected)}: damaged?")
    if info["unexpected_keys"]:
        extra = sorted(info["unexpected_keys"])
        raise KvfoldError(
            f"{path}: {len(extra)} tensors are not in the model that the config describes, first {extra[0]}"
        )
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise KvfoldError(f"{path}: weight {key} has NaN or infinite entries")
    if gguf:
        _forget_quantization(model)
    try:
        model = model.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise KvfoldError(f"device {device!r} cannot be used: {one_line(error)}") from error
    return Checkpoint(path, model, _tokenizer(name, where), folder)


def require_unfolded(checkpoint: Checkpoint) -> None:
    """Raises KvfoldError where the checkpoint is a converted one already."""
    if is_folded(checkpoint.config):
        raise KvfoldError(f"{checkpoint.path} is folded already; give its source (named in its kvfold.json)")


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise KvfoldError(f"dtype {name!r} is unknown: use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _locate(path: str) -> tuple[Path | None, str | None]:
    """The local folder (None: a Hub id) and the name of the GGUF file in it (None: an ordinary checkpoint)."""
    local = Path(path).expanduser()
    if local.is_file():
        if local.suffix != ".gguf":
            raise KvfoldError(f"{path} is a file: MODEL is a folder, a Hub id or a .gguf file")
        with local.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise KvfoldError(f"{path} is not a GGUF file (its first bytes say otherwise)")
        return local.resolve().parent, local.name
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise KvfoldError(f"{path} has no config.json: not a Hugging Face checkpoint")
        return local.resolve(), None
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith(".gguf"):
        raise KvfoldError(f"{path} does not exist")
    return None, None


def _check_family(name: str, where: dict[str, Any]) -> None:
    """Refuse an unknown family before its code would have to be trusted or its weights read. Raises KvfoldError."""
    if where:
        family_of(AutoConfig.from_pretrained(name, **where))
    else:
        entries, _ = PreTrainedConfig.get_config_dict(name)
        if not isinstance(entries, dict):
            raise KvfoldError("its config.json holds no settings")
        require_known(str(entries.get("model_type")))
        if entries.get("quantization_config"):
            raise KvfoldError("it is quantised; give the unquantised checkpoint (or a GGUF file, which is dequantised)")


def _check_weight_files(folder: Path) -> None:
    """Every shard that the index names is there. Raises KvfoldError."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise KvfoldError(f"{index} is damaged: {one_line(error)}") from error
        for shard in shards:
            if not (folder / shard).is_file():
                raise KvfoldError(f"{folder}: shard {shard} is missing")
    elif not (folder / "model.safetensors").is_file():
        raise KvfoldError(f"{folder} has no safetensors weights (model.safetensors or its index)")


def _tokenizer(name: str, where: dict[str, Any]) -> Any:
    try:
        with quiet(), _no_bar(where.get("gguf_file")):
            return AutoTokenizer.from_pretrained(name, trust_remote_code=False, **where)
    except (OSError, ValueError, KeyError):
        return None


def _forget_quantization(model: Any) -> None:
    """Make a dequantised GGUF model an ordinary float model, that ``save_pretrained`` writes as such."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


@contextmanager
def _one_line(path: str) -> Iterator[None]:
    """Turn what transformers raises for a broken checkpoint into one line that names it."""
    try:
        yield
    except KvfoldError as error:
        raise KvfoldError(f"{path}: {error}") from error
    except SafetensorError as error:
        raise KvfoldError(f"{path}: a safetensors file is damaged or cut short ({one_line(error)})") from error
    except (
        OSError,
        ValueError,
        RuntimeError,
        LookupError,
        TypeError,
        EOFError,
        AttributeError,
        ArithmeticError,
        ImportError,
    ) as error:
        reason = f"{type(error).__name__} {one_line(error)}" if isinstance(error, LookupError) else one_line(error)
        raise KvfoldError(f"{path} cannot be loaded: {reason}") from error


def _no_bar(gguf: str | None) -> AbstractContextManager:
    """transformers' GGUF reader draws a bar that no setting turns off, terminal or not."""
    return redirect_stderr(io.StringIO()) if gguf else nullcontext()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' own bars and warnings off a terminal that shows ours."""
    level, hub_level = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()  # its retries, when it cannot be reached
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        hub_logging.set_verbosity(hub_level)
        if bars:
            transformers_logging.enable_progress_bar()
