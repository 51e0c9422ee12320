# SPDX-License-Identifier: Apache-2.0
"""What training must refuse before its first step, for it would cost a run to find out later.

Reads a few kilobytes of each data set and imports neither Composer nor LLM-Foundry. Every error
names the configuration key, its value and the remedy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from asymloop_foundry.data.encoding import fingerprint
from asymloop_foundry.data.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    Manifest,
    read_manifest,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKEN_TYPES = ('int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'uint64')
_PREPARE = 'python data_prep/convert_fineweb.py --out FOLDER'
_PREPARE_SFT = 'python data_prep/convert_gsm8k.py --out FOLDER'
_SFT_COLUMNS = ({'input_ids', 'labels'}, {'prompt', 'response'}, {'messages'}, {'turns'})


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, key: str = 'tokenizer') -> None:
    """Refuse a tokenizer with which the loss would be wrong.

    LLM-Foundry's collator takes every position that holds the pad id out of the loss. With the
    EOS as pad no document end would ever be learned, and none could be generated.

    Args:
        tokenizer: The run's tokenizer.
        key: The configuration key that chose it, for the message.

    Raises:
        ValueError: It has no EOS, no pad token, or one token for both.
    """
    name = getattr(tokenizer, 'name_or_path', '')
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f'{key}={name!r} has no EOS token, so documents would run into each other. Choose '
            f'another tokenizer, or give one of its reserved tokens as {key}.kwargs.eos_token.'
        )
    spare = [t for t in tokenizer.additional_special_tokens if t != tokenizer.eos_token]
    choice = (
        f'Give a reserved token that text never uses as {key}.kwargs.pad_token (--pad-token in '
        f'data preparation), such as {spare[-1]!r}.'
        if spare
        else f'Give a reserved token as {key}.kwargs.pad_token (--pad-token in data preparation).'
    )
    if tokenizer.pad_token_id is None:
        raise ValueError(f'{key}={name!r} has no pad token. {choice}')
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise ValueError(
            f'{key}={name!r} pads with its EOS token {tokenizer.eos_token!r} (id '
            f'{tokenizer.eos_token_id}): the loss leaves pads out, so no document end would be '
            f'learned. {choice}'
        )


def check_training_data(
    dataset: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_len: int,
    key: str,
) -> None:
    """Refuse a streaming text data set that this run would misread.

    Args:
        dataset: LLM-Foundry's ``train_loader.dataset`` (or ``eval_loader.dataset``) mapping.
        tokenizer: The run's tokenizer.
        max_seq_len: The run's sequence length in tokens.
        key: Where the mapping stands, such as ``train_loader.dataset``, for the messages.

    Raises:
        ValueError: A local folder or its index is missing with no remote to fetch it from; the
            data's manifest names another tokenizer, vocabulary or sequence length; tokens were
            written as one integer type and would be read as another; ids lie outside the
            vocabulary; or ``cache_limit`` would delete the only copy.
    """
    for where, stream in _streams(dataset, key):
        local, remote, split = (stream.get(name) for name in ('local', 'remote', 'split'))
        has_remote = remote is not None and remote != local
        _check_cache_limit(dataset, stream, has_remote, where, key)
        if local is None:
            continue
        folder = Path(os.path.expanduser(str(local))) / str(split or '')
        if not (folder / INDEX_NAME).is_file():
            if not has_remote:
                _refuse_missing(folder, local, split, where)
            manifest = _remote_manifest(str(remote), split)
        else:
            manifest = read_manifest(folder)
            _check_columns(folder, dataset, stream, tokenizer, has_remote, where, key)
        if manifest is not None:
            _check_manifest(manifest, folder, tokenizer, max_seq_len, where)


def check_finetuning_data(
    dataset: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_len: int,
    key: str,
) -> None:
    """Refuse encoded prompts and responses that this run would misread.

    Args:
        dataset: LLM-Foundry's ``dataset`` mapping of a ``finetuning`` loader.
        tokenizer: The run's tokenizer.
        max_seq_len: The run's sequence length in tokens.
        key: Where the mapping stands, for the messages.

    Raises:
        ValueError: A local folder or its index is missing, its columns are none that Foundry reads, or
            its manifest names another tokenizer or longer rows.
    """
    for where, stream in _streams(dataset, key):
        place = stream.get('remote') or stream.get('local')
        if place is None or '://' in str(place):
            continue
        root, split = Path(os.path.expanduser(str(place))), stream.get('split')
        folder = root / str(split or '')
        if not (folder / INDEX_NAME).is_file():
            raise ValueError(
                f'{where}.remote={place!r} with split={split!r}: {folder / INDEX_NAME} is missing. Prepare '
                f'the data ({_PREPARE_SFT}), or correct remote and split.'
            )
        columns = set(_first_shard(folder, place, where, _PREPARE_SFT)['column_names'])
        if not any(kind <= columns for kind in _SFT_COLUMNS):
            raise ValueError(
                f'{where}.remote={place!r}: {folder / INDEX_NAME} has the columns {sorted(columns)}, and '
                f'fine-tuning needs input_ids and labels, or prompt and response, or messages. Prepare '
                f'the data again ({_PREPARE_SFT}).'
            )
        _check_sft_manifest(root / MANIFEST_NAME, tokenizer, max_seq_len, where)


def _check_sft_manifest(
    path: Path, tokenizer: PreTrainedTokenizerBase, max_seq_len: int, where: str
) -> None:
    if not path.is_file():
        return
    try:
        manifest = json.loads(path.read_text(encoding='utf-8'))
        request, recorded = manifest['request'], manifest['request']['tokenizer_fingerprint']
        longest = int(request['max_seq_len'])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f'{where}: {path} is not a manifest of prepared data ({error!r}). Prepare the data again '
            f'({_PREPARE_SFT}).'
        ) from error
    if recorded != fingerprint(tokenizer):
        name = getattr(tokenizer, 'name_or_path', '')
        raise ValueError(
            f'{where}: the rows in {path.parent} were encoded with {manifest.get("tokenizer")!r} '
            f'(fingerprint {str(recorded)[:12]}); tokenizer.name={name!r} is another tokenizer '
            f'(fingerprint {fingerprint(tokenizer)[:12]}). Use that tokenizer, or prepare the data again '
            f'with this one ({_PREPARE_SFT} --tokenizer ...).'
        )
    if longest > max_seq_len:
        raise ValueError(
            f'{where}: the rows in {path.parent} may have {longest} tokens, and max_seq_len={max_seq_len} '
            f'would cut answers off. Set max_seq_len={longest}, or prepare the data again '
            f'({_PREPARE_SFT} --max-seq-len {max_seq_len}).'
        )


def check_loaders(
    train_loader: Mapping[str, Any],
    eval_loaders: Mapping[str, Any] | Iterable[Mapping[str, Any]] | None,
) -> None:
    """Refuse an evaluation loader that streams from or into the training loader's folder.

    Args:
        train_loader: The ``train_loader`` mapping.
        eval_loaders: The ``eval_loader`` mapping, a list of them, or None.

    Raises:
        ValueError: Two loaders, or two streams of one, name the same ``local`` and ``split``.
    """
    if eval_loaders is None:
        loaders: Sequence[Mapping[str, Any]] = []
    elif isinstance(eval_loaders, Mapping):
        loaders = [eval_loaders]
    else:
        loaders = list(eval_loaders)
    named = [('train_loader.dataset', train_loader)]
    for number, loader in enumerate(loaders):
        name = 'eval_loader' if isinstance(eval_loaders, Mapping) else f'eval_loader[{number}]'
        named.append((f'{name}.dataset', loader))
    seen: dict[str, str] = {}
    for key, loader in named:
        for where, stream in _streams(loader.get('dataset') or {}, key):
            if stream.get('local') is None:
                continue
            folder = os.path.realpath(
                os.path.join(
                    os.path.expanduser(str(stream['local'])), str(stream.get('split') or '')
                )
            )
            if folder in seen:
                raise ValueError(
                    f'{where}.local={stream["local"]!r} with split={stream.get("split")!r} is the '
                    f'folder of {seen[folder]} too ({folder}): the run would be scored on what it '
                    'learns from, and two streams must not share a local folder. Give each its '
                    'own local or split.'
                )
            seen[folder] = where


def _streams(dataset: Mapping[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
    """List a data set's streams, each with the keys it inherits from the data set."""
    inherited = {name: dataset.get(name) for name in ('local', 'remote', 'split')}
    streams = dataset.get('streams')
    if not streams:
        return [(key, inherited)]
    return [
        (f'{key}.streams.{name}', {'split': inherited['split'], **dict(stream)})
        for name, stream in streams.items()
    ]


def _check_cache_limit(
    dataset: Mapping[str, Any], stream: Mapping[str, Any], has_remote: bool, where: str, key: str
) -> None:
    if dataset.get('cache_limit') is not None and not has_remote:
        raise ValueError(
            f'{key}.cache_limit={dataset["cache_limit"]!r} with {where}.remote='
            f'{stream.get("remote")!r}: shards beyond the limit are deleted, and '
            f'{where}.local={stream.get("local")!r} is the only copy. Remove cache_limit, or name '
            'the remote folder that the shards can be fetched from again.'
        )


def _refuse_missing(folder: Path, local: Any, split: Any, where: str) -> None:
    if not folder.is_dir():
        begun = folder.with_name(f'{folder.name}.incomplete')
        state = 'half prepared' if begun.is_dir() else 'missing'
        what = f'its folder {folder} is {state}'
    else:
        what = f'{folder / INDEX_NAME} is missing'
    raise ValueError(
        f'{where}.local={local!r} with split={split!r}: {what}, and there is no remote to fetch '
        f'it from. Prepare the data ({_PREPARE}; it continues what was begun), or correct local '
        'and split, or give remote.'
    )


def _remote_manifest(remote: str, split: Any) -> Manifest | None:
    """Read the manifest of data that has not been fetched yet; None where it has none."""
    if '://' not in remote:
        return read_manifest(os.path.join(remote, str(split or '')))
    from asymloop_foundry.data.remote import fetch_text

    text = fetch_text(
        '/'.join([remote.rstrip('/'), *([str(split)] if split else []), MANIFEST_NAME])
    )
    return Manifest.from_json(text) if text is not None else None


def _check_manifest(
    manifest: Manifest,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_len: int,
    where: str,
) -> None:
    request = manifest.request
    recorded = request.tokenizer
    again = (
        f'Use that tokenizer, or prepare the data again with this one ({_PREPARE} --tokenizer ...).'
    )
    name = getattr(tokenizer, 'name_or_path', '')
    if recorded.vocab_size != len(tokenizer):
        raise ValueError(
            f'{where}: the data in {folder} was tokenized with {recorded.name!r}, a vocabulary of '
            f'{recorded.vocab_size} entries; tokenizer.name={name!r} has {len(tokenizer)}. {again}'
        )
    if recorded.fingerprint != fingerprint(tokenizer):
        raise ValueError(
            f'{where}: the data in {folder} was tokenized with {recorded.name!r} (fingerprint '
            f'{recorded.fingerprint[:12]}); tokenizer.name={name!r} is another tokenizer '
            f'(fingerprint {fingerprint(tokenizer)[:12]}). {again}'
        )
    if recorded.eos_id != tokenizer.eos_token_id:
        raise ValueError(
            f'{where}: documents in {folder} end in {recorded.eos_token!r} (id {recorded.eos_id}); '
            f'the EOS of tokenizer.name={name!r} is {tokenizer.eos_token!r} (id '
            f'{tokenizer.eos_token_id}). Set tokenizer.kwargs.eos_token to {recorded.eos_token!r}.'
        )
    if request.row_format == 'padded' and recorded.pad_id != tokenizer.pad_token_id:
        raise ValueError(
            f'{where}: rows in {folder} are padded with {recorded.pad_token!r} (id '
            f'{recorded.pad_id}); the pad token of tokenizer.name={name!r} is '
            f'{tokenizer.pad_token!r} (id {tokenizer.pad_token_id}), so pads would be learned. Set '
            f'tokenizer.kwargs.pad_token to {recorded.pad_token!r}.'
        )
    if request.seq_len != max_seq_len:
        raise ValueError(
            f'{where}: rows in {folder} hold {request.seq_len} tokens; max_seq_len={max_seq_len}. '
            f'Set max_seq_len to {request.seq_len}, or prepare the data again with --seq-len '
            f'{max_seq_len}.'
        )


def _check_columns(
    folder: Path,
    dataset: Mapping[str, Any],
    stream: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    has_remote: bool,
    where: str,
    key: str,
) -> None:
    index = folder / INDEX_NAME
    shard = _first_shard(folder, stream['local'], where, _PREPARE)
    encodings = dict(zip(shard['column_names'], shard['column_encodings'], strict=True))
    if 'text' in encodings:
        return
    if 'tokens' not in encodings:
        raise ValueError(
            f'{where}.local={stream["local"]!r}: {index} has the columns {sorted(encodings)}, and '
            f'training needs tokens (or text). Prepare the data again ({_PREPARE}).'
        )
    encoding = encodings['tokens']
    declared = dataset.get('token_encoding_type')
    if encoding == 'bytes' and declared not in TOKEN_TYPES:
        raise ValueError(
            f'{key}.token_encoding_type={declared!r}: the tokens in {folder} are plain bytes, '
            'which say nothing of their integer type (int64 would be assumed). Set it to the type '
            f'they were written with, one of {", ".join(TOKEN_TYPES)}.'
        )
    if encoding.startswith('ndarray') and declared is not None:
        written = encoding.split(':')[1] if ':' in encoding else None
        if written is not None and written != declared:
            raise ValueError(
                f'{key}.token_encoding_type={declared!r}: the tokens in {folder} are stored as '
                f'{written} arrays, which carry their own type. Remove the key or set it to '
                f'{written!r}.'
            )
    try:
        tokens = _first_tokens(folder, shard, str(declared))
    except (ValueError, OSError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f'{where}.local={stream["local"]!r}: the first shard in {folder}, '
            f'{shard.get("raw_data", {}).get("basename")}, cannot be read ({error}), so it is damaged. Prepare '
            f'the data again ({_PREPARE}), or remove the local copy where there is a remote.'
        ) from error
    if tokens is None:
        if has_remote:
            return
        raise ValueError(
            f'{where}.local={stream["local"]!r}: {folder} has an index but not its first shard '
            f'{shard["raw_data"]["basename"]}, and there is no remote to fetch it from. Prepare '
            f'the data again ({_PREPARE}).'
        )
    _check_ids(tokens, encoding, declared, folder, tokenizer, where, key)


def _first_shard(folder: Path, place: Any, where: str, prepare: str) -> Mapping[str, Any]:
    """The first entry of an MDS index."""
    index = folder / INDEX_NAME
    try:
        shard = json.loads(index.read_text(encoding='utf-8'))['shards'][0]
        if len(shard['column_names']) != len(shard['column_encodings']):
            raise ValueError('columns and encodings differ in number')
        return shard
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f'{where}.local={place!r}: {index} is not the index of an MDS data set with at least one '
            f'shard ({error!r}). Prepare the data again ({prepare}).'
        ) from error


def _check_ids(
    tokens: np.ndarray,
    encoding: str,
    declared: Any,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    key: str,
) -> None:
    size = len(tokenizer)
    wrong = tokens.dtype.kind not in 'iu' or tokens.ndim != 1
    outside = not wrong and tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= size)
    # The halves of small wide integers read as narrow ones are an id, a zero, an id, a zero.
    halves = (
        encoding == 'bytes'
        and tokens.size % 2 == 0
        and not tokens[1::2].any()
        and np.count_nonzero(tokens[::2]) > 2
    )
    if not (wrong or outside or halves):
        return
    what = (
        'not a row of integers'
        if wrong
        else f'ids from {int(tokens.min())} to {int(tokens.max())}'
        if outside
        else 'a zero after every id'
    )
    if encoding == 'bytes':
        raise ValueError(
            f'{key}.token_encoding_type={declared!r}: read so, the first row in {folder} gives '
            f'{what}, with a vocabulary of {size}. The tokens were written as another integer '
            'type: set token_encoding_type to that one.'
        )
    raise ValueError(
        f'{where}: the first row in {folder} ({encoding}) gives {what}, with a vocabulary of '
        f'{size} (tokenizer.name={getattr(tokenizer, "name_or_path", "")!r}). The data belongs to '
        f'another tokenizer: use that one, or prepare the data again ({_PREPARE} --tokenizer ...).'
    )


def _first_tokens(folder: Path, shard: Mapping[str, Any], dtype: str) -> np.ndarray | None:
    """Decode the first row of a shard without unpacking the shard.

    Returns:
        The tokens; None where the shard is not here.
    """
    from streaming.base.format.mds.encodings import mds_decode

    head = _open_shard(folder, shard)
    if head is None:
        return None
    with head as file:
        begin, end = np.frombuffer(file.read(12), np.uint32)[1:]
        file.read(int(begin) - 12)
        data = file.read(int(end - begin))
    # Variable-size columns store their sizes in front, then come all columns in order.
    sizes, at = [], 0
    for size in shard['column_sizes']:
        if not size:
            size = int(np.frombuffer(data[at : at + 4], np.uint32)[0])
            at += 4
        sizes.append(size)
    position = list(shard['column_names']).index('tokens')
    at += sum(sizes[:position])
    blob = data[at : at + sizes[position]]
    encoding = shard['column_encodings'][position]
    if encoding == 'bytes':
        usable = len(blob) - len(blob) % np.dtype(dtype).itemsize
        return np.frombuffer(blob[:usable], dtype=dtype)
    return np.asarray(mds_decode(encoding, blob))


def _open_shard(folder: Path, shard: Mapping[str, Any]) -> Any:
    import io

    import pyarrow as pa

    raw = folder / shard['raw_data']['basename']
    if raw.is_file():
        return open(raw, 'rb')
    packed = shard.get('zip_data') and folder / shard['zip_data']['basename']
    if not packed or not packed.is_file():
        return None
    algorithm = shard['compression'].split(':')[0]
    if algorithm == 'zstd':
        return pa.input_stream(str(packed), compression='zstd')
    from streaming.base.compression import decompress

    return io.BytesIO(decompress(shard['compression'], packed.read_bytes()))
