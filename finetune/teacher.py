"""The model that a folded one learns from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checkpoint.hub import Access
from ..checkpoint.loading import Checkpoint, load
from ..checkpoint.source_identity import describe_source
from ..model import KvfoldError, family_of


def load_teacher(
    named: str | None, source: dict[str, Any] | None, student: Checkpoint, dtype: str, device: str, access: Access
) -> Checkpoint:
    """Load the teacher and make sure that it speaks the student's language.

    Args:
        named: MODEL; None: ``source``, as the student's recipe describes it. student: what is to learn. dtype, device,
            access: see ``load``.

    Raises:
        KvfoldError: where the source is not there or not what it was, or vocabulary or tokenizer are others.
    """
    source = source or {}  # of a student that was trained from scratch
    path = named if named is not None else source["path"]
    mine = replace(access, revision=source.get("revision") if named is None else None)
    try:
        teacher = load(path, dtype, device, mine)
    except KvfoldError as error:
        if named is not None:
            raise
        told = "(kvfold.json names it as the source: give another with --teacher, or use --loss lm)"
        raise KvfoldError(f"teacher {error} {told}") from error
    known = source.get("sha256") if named is None else None
    if known is not None and describe_source(path, teacher.folder, teacher.config)["sha256"] != known:
        raise KvfoldError(f"{path} is not the model any more that {student.path} was made from: give --teacher")
    theirs, ours = teacher.config.vocab_size, student.config.vocab_size
    if theirs != ours:
        raise KvfoldError(f"teacher {path} has a vocabulary of {theirs}, {student.path} one of {ours}")
    tokenizers = [each.tokenizer for each in (teacher, student) if each.tokenizer is not None]
    if len(tokenizers) == 2 and tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
        raise KvfoldError(f"teacher {path} has another tokenizer than {student.path}: its tokens mean other text")
    return teacher


def shard_teacher(teacher: Any, device_type: str, processes: int) -> None:
    """Spread the teacher's weights over the processes, layer by layer (FSDP2); its head stays whole once gathered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device_type, (processes,))
    for layer in family_of(teacher.config).decoder_layers(teacher):
        fully_shard(layer, mesh=mesh)
    fully_shard(teacher, mesh=mesh, reshard_after_forward=False)
