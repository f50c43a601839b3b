"""Checkpoints on the Hub: which of their files are fetched, and with what rights."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging

from ..model import KvfoldError
from ..model.errors import one_line

LICENCES = ("LICENSE*", "NOTICE*", "USE_POLICY*")
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tekken.json",
    "*.model",
    "chat_template*",
    "additional_chat_templates/*",
)
SMALL_FILES = (  # all that is read beside the weights
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "kvfold.json",
    "*.index.json",
    *TOKENIZER_FILES,
    *LICENCES,
)


@dataclass(frozen=True)
class Access:
    """How MODEL may be read.

    Attributes:
        revision: branch, tag or commit of a Hub id; None: its main branch.
        token: for the Hub; None: what huggingface_hub finds itself, the variable HF_TOKEN or a login. It shows in no
            error and no repr.
        allow_pickle: take pickled weights where there are no safetensors.

    Raises KvfoldError for a token that no HTTP header can carry.
    """

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        if self.token and not re.fullmatch("[!-~]+", self.token):
            raise KvfoldError("the Hub token holds spaces or characters that no token has: copy it again")

    def each(self, models: Sequence[str]) -> list[Access]:
        """How each of several MODELs is read: the revision belongs to the Hub ids among them.

        Raises KvfoldError where there is a revision and no Hub id.
        """
        if self.revision and not any(map(is_hub_id, models)):
            raise KvfoldError(f"revision {self.revision!r} is of no use: none of the models is a Hub id")
        return [self if is_hub_id(model) else replace(self, revision=None) for model in models]


DEFAULT_ACCESS = Access()


def is_hub_id(model: str) -> bool:
    """Whether MODEL is to be looked for on the Hub: nothing here has that name, and it is not written as a path."""
    written_as_path = model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(".gguf")
    return not written_as_path and not Path(model).exists()


def fetch(model: str, names: Sequence[str], access: Access, partly: bool = False) -> Path:
    """Download the files of a Hub id that ``names`` (with wildcards) match, where they are not in the cache already.

    Args:
        model: Hub id. names: of files. access: revision and token.
        partly: be content with what the cache has where the Hub cannot be reached.

    Returns:
        The snapshot folder in the Hub's cache, whose name is the commit.

    Raises:
        KvfoldError: where they cannot be had; it does not name the model.
    """
    try:
        with quiet(bars=sys.stderr.isatty()):
            return Path(
                snapshot_download(
                    model, revision=access.revision or None, token=access.token or None, allow_patterns=list(names)
                )
            )
    except LocalEntryNotFoundError as error:
        snapshot = _in_cache(model, access)
        if snapshot and partly:
            return snapshot
        what = "some of its files are" if snapshot else f"revision {access.revision or 'main'!r} is"
        raise KvfoldError(
            f"no such folder here; as a Hub id, {what} not in the local cache, and the Hub cannot be reached"
        ) from error
    except GatedRepoError as error:
        raise KvfoldError(
            "gated on the Hub: accept its terms on its page there, then log in or give --token"
        ) from error
    except RepositoryNotFoundError as error:
        raise KvfoldError(
            "no such folder here, and no such Hub id (if it is a private one, log in or give --token)"
        ) from error
    except RevisionNotFoundError as error:
        raise KvfoldError(f"no revision {access.revision!r} on the Hub: give a branch, tag or commit") from error
    except Exception as error:  # what its HTTP library raises has no class in common
        reason = _without(access.token, one_line(error))
        raise KvfoldError(f"no such folder here, and as a Hub id it cannot be fetched: {reason}") from error


def _in_cache(model: str, access: Access) -> Path | None:
    """The snapshot folder of an earlier download, whatever it lacks."""
    try:
        return Path(snapshot_download(model, revision=access.revision or None, local_files_only=True))
    except LocalEntryNotFoundError as error:
        partial = getattr(error, "snapshot_path", None)
        return Path(partial) if partial else None


def on_hub(model: str, name: str, access: Access) -> bool:
    """Whether a Hub id has a file of that name; False, too, where the Hub cannot be reached."""
    try:
        with quiet():
            return HfApi(token=access.token or None).file_exists(model, name, revision=access.revision or None)
    except Exception:  # as above; the question is only asked to say more about a failure
        return False


def _without(token: str | None, text: str) -> str:
    """``text`` with the token blotted out."""
    return text.replace(token, "***") if token else text


@contextmanager
def quiet(bars: bool = False) -> Iterator[None]:
    """Keep the warnings of transformers and of the Hub's client, and unless ``bars`` their bars, off the terminal."""
    level, hub_level = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if not bars:
        transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()  # its retries, when it cannot be reached
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        hub_logging.set_verbosity(hub_level)
        if enabled:
            transformers_logging.enable_progress_bar()
