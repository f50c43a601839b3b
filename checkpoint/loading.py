"""Checkpoints in: a folder, a Hub id or a GGUF file becomes a transformers model and its tokenizer."""

from __future__ import annotations

import io
import json
import pickle
import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from ..model import KvfoldError, family_to_fold, is_folded, require_known
from ..model.errors import one_line
from .encoders import ENCODERS, is_encoder
from .hub import DEFAULT_ACCESS, SMALL_FILES, Access, fetch, is_hub_id, on_hub, quiet
from .record import record_entries

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEADS_MAY_DIFFER = ("missing_keys", "unexpected_keys")
SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"  # transformers' names; sharded: with an index beside


@dataclass(frozen=True)
class Location:
    """Where a checkpoint lies.

    Attributes:
        path: what the user gave. folder: with its files; of a Hub id its snapshot in the Hub's cache, a folder named by
            the commit. files: its weights. gguf: name of the GGUF file in ``folder``, where it is one.
    """

    path: str
    folder: Path
    files: list[Path]
    gguf: str | None = None

    @property
    def pickled(self) -> bool:
        """Whether the weights are pickles."""
        return self.gguf is None and _pickled(self.files)


@dataclass
class Checkpoint:
    """A loaded model, ready to be read or run.

    Attributes:
        path: what the user gave. model: in evaluation mode. tokenizer: None where the folder has none.
        folder: the local folder the weights came from, see ``Location``.
    """

    path: str
    model: Any
    tokenizer: Any
    folder: Path

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config


def load(
    path: str, dtype: str = "auto", device: str = "cpu", access: Access = DEFAULT_ACCESS, encoders: bool = False
) -> Checkpoint:
    """Load MODEL, checked: every tensor there, finite, of the right shape.

    Args:
        path: folder, Hub id or ``.gguf`` file. dtype: ``auto`` (as stored) or a key of ``DTYPES``.
        device: torch device. access: revision, token, and whether pickled weights may be read.
        encoders: whether the model may be an encoder; of those the base model is loaded.

    Raises:
        KvfoldError: for anything about the checkpoint that is wrong.
    """
    torch_dtype: Any = "auto" if dtype == "auto" else named_dtype(dtype)
    location = locate(path, access, encoders)
    encoder = not location.gguf and is_encoder(_model_type(location.folder))
    how: dict[str, Any]
    if location.gguf:
        how = {"gguf_file": location.gguf}
        torch_dtype = torch.float32 if dtype == "auto" else torch_dtype
    else:
        how = {"use_safetensors": not location.pickled, "weights_only": True}
    with one_line_errors(path), quiet(), _no_bar(location.gguf), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about the age of pickles
        loaded: Any = (AutoModel if encoder else AutoModelForCausalLM).from_pretrained(
            str(location.folder),
            dtype=torch_dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            trust_remote_code=False,
            **how,
        )
    model, info = loaded
    if encoder:  # checkpoints of encoders come with one head or another, which is not asked for
        layers = ENCODERS[model.config.model_type][0].partition("{}")[0]
        info = dict(info) | {part: [key for key in info[part] if layers in key] for part in HEADS_MAY_DIFFER}
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
    if location.gguf:
        _forget_quantization(model)
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        # The config may say otherwise: transformers does not tie weights that are both stored and differ.
        model.config.tie_word_embeddings = False
    try:
        model = model.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise KvfoldError(f"device {device!r} cannot be used: {one_line(error)}") from error
    return Checkpoint(path, model, load_tokenizer(location), location.folder)


def locate(path: str, access: Access = DEFAULT_ACCESS, encoders: bool = False) -> Location:
    """Find MODEL and all its files, on the Hub if need be, without reading its weights.

    Raises KvfoldError where it is not there, not of a known family, incomplete, or pickled without leave.
    """
    folder, gguf = _folder(path, access)
    with one_line_errors(path):
        with quiet(), _no_bar(gguf):
            _check_config(folder, gguf, encoders)
        if gguf:
            return Location(path, folder, [folder / gguf], gguf)
        if is_hub_id(path):
            _fetch_weights(path, folder, access)
        return Location(path, folder, _present_weights(folder, access))


def require_unfolded(path: str, folder: Path, config: PreTrainedConfig) -> None:
    """Raises KvfoldError, which tells how it was made, where the checkpoint is a converted one already."""
    if is_folded(config):
        made = _recipe_in_short(folder)
        raise KvfoldError(f"{path} is folded already{made}: give its source, or evaluate it as it is")


def weight_files(folder: Path, named: str | None = None) -> list[Path]:
    """The files that hold the weights of a checkpoint folder, sorted, whether they are there or not.

    Safetensors come before pickles, one file before shards, as transformers takes them; none: an empty list.

    Args:
        folder: the checkpoint. named: the ``transformers_weights`` of its config, which overrule the usual names.

    Raises:
        KvfoldError: for an index of shards that cannot be read.
    """
    for name in [named] if named else [SAFETENSORS, f"{SAFETENSORS}.index.json", PICKLE, f"{PICKLE}.index.json"]:
        if (folder / name).is_file() or named:
            shards = _shards(folder / name) if name.endswith(".index.json") else [name]
            return [folder / shard for shard in shards]
    return []


def _shards(index: Path) -> list[str]:
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        pickles = [shard for shard in shards if not shard.endswith(".safetensors")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise KvfoldError(f"{index.name} is damaged: {one_line(error)}") from error
    if pickles and not index.name.startswith(PICKLE):
        raise KvfoldError(f"{index.name} is damaged: it names {pickles[0]}, which is not a safetensors file")
    return shards


def _recipe_in_short(folder: Path) -> str:
    """What ``kvfold.json`` tells, in brackets; nothing where it is missing or not what it should be."""
    try:
        recipe = record_entries(folder) or {}
        source, fraction = one_line(ValueError(recipe["source"]["path"])), f"{recipe['cache_fraction']:.4g}"
        return f" ({recipe['method']}, span {recipe['span']}, cache fraction {fraction}, from {source})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def named_dtype(name: str) -> torch.dtype:
    """The dtype of this name. Raises KvfoldError for an unknown one."""
    if name not in DTYPES:
        raise KvfoldError(f"dtype {name!r} is unknown: use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _folder(path: str, access: Access) -> tuple[Path, str | None]:
    """The local folder and the name of the GGUF file in it (None: an ordinary checkpoint).

    Of a Hub id all but the weights is fetched, so that they need not be where the model is to be refused.
    """
    if is_hub_id(path):
        with one_line_errors(path):
            folder = fetch(path, SMALL_FILES, access, partly=True)
        if not (folder / "config.json").is_file():
            raise KvfoldError(f"{path} has no config.json on the Hub: not a Hugging Face checkpoint")
        return folder, None
    local = Path(path).expanduser()
    if access.revision and local.exists():
        kind = "folder" if local.is_dir() else "file"
        raise KvfoldError(
            f"{path} is a local {kind} and has no revision {access.revision!r}: only Hub ids have revisions"
        )
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
    raise KvfoldError(f"{path} does not exist")


def _fetch_weights(model: str, snapshot: Path, access: Access) -> None:
    """Download the weights of a Hub id into its snapshot: safetensors, or else pickles where they are allowed."""
    pinned = replace(access, revision=snapshot.name)  # the branch may have moved since
    named = _named_weights(snapshot)
    fetch(model, [named or SAFETENSORS], pinned)
    files = weight_files(snapshot, named)
    if not files or _pickled(files):
        if not access.allow_pickle:
            if files or on_hub(model, PICKLE, pinned):
                raise _only_pickled()
            return
        fetch(model, [PICKLE], pinned)
        files = weight_files(snapshot)
    fetch(model, [file.name for file in files], pinned)


def _check_config(folder: Path, gguf: str | None, encoders: bool) -> None:
    """Refuse an unknown family before its code would have to be trusted or its weights read. Raises KvfoldError."""
    if gguf:
        family_to_fold(AutoConfig.from_pretrained(str(folder), gguf_file=gguf))
        return
    entries, _ = PreTrainedConfig.get_config_dict(str(folder))
    if not isinstance(entries, dict):
        raise KvfoldError("its config.json holds no settings")
    if is_encoder(str(entries.get("model_type"))):
        if not encoders:
            raise KvfoldError(
                f"{entries['model_type']} is an encoder, which has no KV cache to fold: only analyze takes it"
            )
    else:
        require_known(str(entries.get("model_type")))
    if entries.get("quantization_config"):
        raise KvfoldError("it is quantised; give the unquantised checkpoint (or a GGUF file, which is dequantised)")
    if (folder / "adapter_config.json").is_file():
        # transformers would load the adapter's base model, from wherever it says, instead of these weights.
        raise KvfoldError("it has a PEFT adapter (adapter_config.json): merge that into its model and give the result")


def _present_weights(folder: Path, access: Access) -> list[Path]:
    """The weight files, all of which are there and may be read. Raises KvfoldError."""
    files = weight_files(folder, _named_weights(folder))
    if not files:
        raise KvfoldError(f"it has no safetensors weights ({SAFETENSORS} or its index)")
    if _pickled(files) and not access.allow_pickle:
        raise _only_pickled()
    for file in files:
        if not file.is_file():
            raise KvfoldError(f"shard {file.name} is missing")
    return files


def _model_type(folder: Path) -> str:
    return str(PreTrainedConfig.get_config_dict(str(folder))[0].get("model_type"))


def _pickled(files: list[Path]) -> bool:
    return any(file.suffix != ".safetensors" for file in files)


def _named_weights(folder: Path) -> str | None:
    """The weight file that the config names itself, which is rare. Raises KvfoldError where it is no safetensors."""
    named = PreTrainedConfig.get_config_dict(str(folder))[0].get("transformers_weights")
    if named and not str(named).endswith((".safetensors", ".safetensors.index.json")):
        raise KvfoldError(f"its config.json names the weights {named!r} (transformers_weights): no safetensors file")
    return named or None


def _only_pickled() -> KvfoldError:
    return KvfoldError(
        f"it has only pickled weights ({PICKLE}), and a pickle can carry code that runs when it is read: use a "
        "safetensors version, or --allow-pickle, which reads tensors and refuses everything else in it"
    )


def load_tokenizer(location: Location) -> Any:
    """The tokenizer of a checkpoint, or None where it has none."""
    where = {"gguf_file": location.gguf} if location.gguf else {}
    try:
        with quiet(), _no_bar(location.gguf):
            return AutoTokenizer.from_pretrained(str(location.folder), trust_remote_code=False, **where)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _forget_quantization(model: Any) -> None:
    """Make a dequantised GGUF model an ordinary float model, that ``save_pretrained`` writes as such."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


@contextmanager
def one_line_errors(path: str) -> Iterator[None]:
    """Turn what transformers raises for a broken checkpoint into one line that names it."""
    try:
        yield
    except KvfoldError as error:
        raise KvfoldError(f"{path}: {error}") from error
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"hold {found[1]}, which is not a tensor" if found else "are damaged, or something else than tensors"
        raise KvfoldError(f"{path}: the pickled weights {what}; they were not loaded") from error
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
        StrictDataclassError,
    ) as error:
        reason = f"{type(error).__name__} {one_line(error)}" if isinstance(error, LookupError) else one_line(error)
        raise KvfoldError(f"{path} cannot be loaded: {reason}") from error


def _no_bar(gguf: str | None) -> AbstractContextManager:
    """transformers' GGUF reader draws a bar that no setting turns off, terminal or not."""
    return redirect_stderr(io.StringIO()) if gguf else nullcontext()
