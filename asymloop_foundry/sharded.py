# SPDX-License-Identifier: Apache-2.0
"""Sharded Composer checkpoints (``state_dict_type: sharded``) as single files, read without trust.

torch's own reader unpickles a checkpoint's index and its plain values with all of Python at hand. Here
both are restricted to what a checkpoint is made of, and the optimizer's state, two thirds of the bytes,
is not read.
"""

import datetime
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

__all__ = ['is_sharded', 'merge', 'missing_parts']

# What a model is rebuilt from.
_PARTS = {'state.model', 'state.integrations', 'state.timestamp'}

_CLASSES = {
    'pathlib': {'Path', 'PosixPath', 'PurePosixPath'},
    'torch': {'Size'},
    'torch.serialization': {'_get_layout'},
    'torch.distributed.checkpoint.filesystem': {'_StorageInfo', '_StoragePrefix'},
    'torch.distributed.checkpoint.metadata': {
        'BytesStorageMetadata',
        'ChunkStorageMetadata',
        'Metadata',
        'MetadataIndex',
        'StorageMeta',
        'TensorProperties',
        'TensorStorageMetadata',
        '_MEM_FORMAT_ENCODING',
    },
}


def is_sharded(path: str | Path) -> bool:
    """Whether a path is the folder of a sharded checkpoint."""
    return (Path(path) / '.metadata').is_file()


def merge(folder: str | Path, out: str | Path) -> Path:
    """Writes weights, configuration, tokenizer and step of a sharded checkpoint as one ``.pt`` file.

    Args:
        folder: such as ``checkpoints/ep0-ba1000``, or the ``latest-rank0.pt`` that links to it.
        out: the new file; ``evaluation.loading.load`` reads it as any Composer checkpoint.

    Returns:
        The file.

    Raises:
        ValueError: the checkpoint holds something that no checkpoint of ours holds.
    """
    state: dict[str, Any] = {}
    try:
        _load_state_dict(
            state, storage_reader=_Reader(folder), planner=_Planner(keys=_PARTS), no_dist=True
        )
    except CheckpointException as error:  # a BaseException, which no caller expects
        raise ValueError(f'{folder} was not loaded: {error}') from error
    torch.save(state, out)
    return Path(out)


def missing_parts(folder: str | Path) -> str | None:
    """What a sharded checkpoint lacks: its index, or files of the length that the index gives them.

    Args:
        folder: such as ``checkpoints/ep0-ba1000``.

    Returns:
        A phrase for an error message; None where everything is there.

    Raises:
        ValueError: the index names something that no index holds.
    """
    folder = Path(folder)
    if not is_sharded(folder):
        return 'it has no .metadata, which is written last'
    try:
        index = _read_index(folder)
        ends: dict[str, int] = {}
        for stored in index.storage_data.values():
            end = stored.offset + stored.length
            ends[stored.relative_path] = max(end, ends.get(stored.relative_path, 0))
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError):
        return 'its .metadata cannot be read, so it is truncated or no index'
    for name, end in sorted(ends.items()):
        path = folder / name
        if not path.is_file():
            return f'its file {name} is missing'
        if path.stat().st_size < end:
            return f'its file {name} has {path.stat().st_size:,} bytes and needs {end:,}'
    return None


def _read_index(folder: str | Path) -> Metadata:
    return _IndexUnpickler(io.BytesIO((Path(folder) / '.metadata').read_bytes())).load()


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == 'torch' and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise ValueError(
            f"the checkpoint's index names {module}.{name}, which no index holds; it was not loaded. "
            'Use a checkpoint that you trust and that torch 2.7 wrote.'
        )


class _Reader(FileSystemReader):
    def read_metadata(self) -> Metadata:
        index = _read_index(str(self.path))
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class _Planner(_EmptyStateDictLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        with torch.serialization.safe_globals([datetime.timedelta]):
            content = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], content)
