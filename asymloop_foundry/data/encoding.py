# SPDX-License-Identifier: Apache-2.0
"""From text to token ids, without the special tokens that tokenizers add by themselves.

The tokenizer's special tokens are left out (T5 appends ``</s>`` by itself, others prepend a BOS)
and special tokens spelled out in a document's text (``<|endoftext|>``) are read as plain text. The
EOS comes later, in :mod:`asymloop_foundry.data.rows`.

Most words of a text have been seen before. Where the tokenizer's declared pipeline makes certain
places a boundary whatever stands around them (:func:`boundary_pattern`), a document is cut there
and each piece's ids come from a table; only new pieces reach the tokenizer. The ids are the same
as for the whole text, several times faster.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from asymloop_foundry.data.manifest import TokenizerRecord

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerBase

# Enough of letters, scripts, digits, whitespace and punctuation to tell apart tokenizers that
# share a vocabulary and differ in merges or normalisation.
PROBES = (
    'The quick brown fox jumps over 1,234.50 lazy dogs; "isn\'t" it?\n\n\tIndeed  -- so it does.',
    'def f(x_0): return {x_0: [x_0 ** 2 / 3.14]}  # na\u00efve caf\u00e9, \ufb01ne \u2167 \uff11',
    '\u03b5\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac, \u0440\u0443\u0441\u0441\u043a\u0438\u0439, '
    '\u65e5\u672c\u8a9e, \u0939\u093f\u0928\u094d\u0926\u0940, \u0639\u0631\u0628\u064a, \U0001f680',
)
TABLE_LIMIT = 500_000

# Both patterns cut only beside a printable ASCII character, where neither a combining mark nor a
# normaliser that works on neighbouring characters can reach across the cut.
_DROP_SPACE = r'(?<=[!-~])[ \n](?=[!-~])'
_KEEP_SPACE = r'(?<=[!-~])(?=[ \n])'
_WORD = re.compile(r'[!-~]+').fullmatch
_LOCAL_NORMALIZERS = {'Precompiled', 'NFC', 'NFD', 'NFKC', 'NFKD', 'Lowercase'}


def load_tokenizer(name: str, pad_token: str | None = None) -> PreTrainedTokenizerBase:
    """Load a fast tokenizer from the hub or a folder.

    Args:
        name: Hub name or local folder.
        pad_token: Token of the vocabulary to pad with, for tokenizers that have none.

    Returns:
        The tokenizer.

    Raises:
        ValueError: It cannot be found, is not a fast one, or does not know ``pad_token``.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f'tokenizer={name!r} cannot be loaded: {error}. Name a tokenizer of the hub or a '
            'folder that holds tokenizer.json.'
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(
            f'tokenizer={name!r} has no fast version (tokenizer.json), which data preparation '
            'needs: save one with AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) where '
            'transformers can convert it.'
        )
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise ValueError(
                f'pad_token={pad_token!r} is not in the vocabulary of {name!r}: name one of its '
                f'reserved tokens, such as {tokenizer.additional_special_tokens[-3:]}.'
            )
        tokenizer.pad_token = pad_token
    return tokenizer


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Identify a tokenizer by what it does, not by its name, folder or library version.

    Args:
        tokenizer: Any transformers tokenizer.

    Returns:
        SHA-256 of its vocabulary and of the ids it gives a fixed text.
    """
    vocabulary = sorted(tokenizer.get_vocab().items())
    ids = [tokenizer(text, add_special_tokens=False)['input_ids'] for text in PROBES]
    return hashlib.sha256(json.dumps([vocabulary, ids]).encode()).hexdigest()


def describe(tokenizer: PreTrainedTokenizerBase, name: str) -> TokenizerRecord:
    """Record a tokenizer that has passed :func:`asymloop_foundry.data.checks.check_tokenizer`.

    Args:
        tokenizer: The tokenizer.
        name: Where it was loaded from.

    Returns:
        Its record.
    """
    return TokenizerRecord(
        name=name,
        fingerprint=fingerprint(tokenizer),
        vocab_size=len(tokenizer),
        eos_token=str(tokenizer.eos_token),
        eos_id=int(tokenizer.eos_token_id),
        pad_token=str(tokenizer.pad_token),
        pad_id=int(tokenizer.pad_token_id),
    )


def boundary_pattern(tokenizer_json: str) -> str | None:
    r"""Find where a text may be cut without changing its ids.

    Two families qualify. Where the pipeline splits at whitespace and marks every word alike (T5:
    ``WhitespaceSplit`` then ``Metaspace`` with an unconditional prefix), the whitespace between
    two words can be dropped. In GPT-2's byte-level pattern no token holds a non-space character
    followed by a space, so a text can be cut in front of any whitespace that follows one. Any
    other pipeline, and any added token that is not special (it would match across cuts), gets
    None.

    Args:
        tokenizer_json: The ``tokenizers`` serialisation.

    Returns:
        A regular expression for ``re.split``, or None: tokenize whole documents.
    """
    spec = json.loads(tokenizer_json)
    if any(not token['special'] for token in spec['added_tokens']):
        return None
    if spec['model'].get('dropout'):
        return None
    if not all(part['type'] in _LOCAL_NORMALIZERS for part in _parts(spec, 'normalizer')):
        return None
    split = _parts(spec, 'pre_tokenizer')
    kinds = [part['type'] for part in split]
    if kinds == ['WhitespaceSplit', 'Metaspace']:
        always = split[1].get(
            'prepend_scheme', 'always' if split[1].get('add_prefix_space') else ''
        )
        return _DROP_SPACE if always == 'always' else None
    if kinds in (['ByteLevel'], ['Digits', 'ByteLevel']):
        plain = split[-1]['use_regex'] and not split[-1]['add_prefix_space']
        return _KEEP_SPACE if plain else None
    return None


def _parts(spec: dict[str, Any], name: str) -> list[dict[str, Any]]:
    part = spec[name]
    if part is None:
        return []
    if part['type'] != 'Sequence':
        return [part]
    return part['normalizers' if name == 'normalizer' else 'pretokenizers']


@dataclasses.dataclass(frozen=True)
class Encoder:
    """How to encode, small enough to be sent to another process.

    Attributes:
        tokenizer_json: The ``tokenizers`` serialisation.
        pattern: What :func:`boundary_pattern` found.
    """

    tokenizer_json: str
    pattern: str | None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Encoder:
        """Take what is needed out of a fast transformers tokenizer.

        Args:
            tokenizer: The tokenizer.

        Returns:
            The encoder.
        """
        text = tokenizer.backend_tokenizer.to_str()
        return cls(tokenizer_json=text, pattern=boundary_pattern(text))

    def build(self) -> DocumentEncoder:
        """Make it ready for work in this process."""
        import tokenizers

        backend = tokenizers.Tokenizer.from_str(self.tokenizer_json)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        return DocumentEncoder(backend, self.pattern)


class DocumentEncoder:
    """Encodes batches of documents.

    Args:
        backend: A ``tokenizers.Tokenizer`` without truncation or padding.
        pattern: Where documents may be cut, or None.
        table_limit: Pieces to remember before starting afresh (about 200 bytes each).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        pattern: str | None,
        table_limit: int = TABLE_LIMIT,
    ) -> None:
        self.backend = backend
        self.split = re.compile(pattern).split if pattern else None
        self.words = _WordEncoder.of(backend) if pattern == _DROP_SPACE else None
        self.table_limit = table_limit
        self.table: dict[str, bytes] = {}

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Encode documents without any special token.

        Args:
            texts: The documents.

        Returns:
            One int32 array of ids per document.
        """
        if self.split is None:
            return self.encode_whole(texts)
        pieces = [self.split(text) for text in texts]
        if len(self.table) > self.table_limit:
            self.table.clear()
        table = self.table
        self._learn(set().union(*pieces).difference(table))
        return [
            np.frombuffer(b''.join(map(table.__getitem__, document)), dtype=np.int32)
            for document in pieces
        ]

    def _learn(self, new: set[str]) -> None:
        """Add pieces to the table."""
        if self.words is not None:
            words = [piece for piece in new if _WORD(piece)]
            for word in words:
                self.table[word] = self.words(word, self.table)
            new = new.difference(words)
        pieces = list(new)
        for piece, ids_T in zip(pieces, self.encode_whole(pieces), strict=True):
            self.table[piece] = ids_T.tobytes()

    def encode_whole(self, texts: list[str]) -> list[np.ndarray]:
        """Encode each document in one piece.

        Args:
            texts: The documents.

        Returns:
            One int32 array of ids per document.
        """
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]


class _WordEncoder:
    """Encodes single words of printable ASCII by the model alone, several times faster.

    Where no entry of a Unigram vocabulary ends in a word's last two characters, the last one
    stands by itself in every segmentation, and what precedes it is segmented as without it. So
    ``word,`` costs nothing where ``word`` is known.

    Args:
        model: The tokenizer's model.
        prefix: What the pipeline puts before a word.
        single: Ids of one-character entries; empty for models other than Unigram.
        endings: Last two characters of longer entries.
    """

    def __init__(
        self,
        model: tokenizers.models.Model,
        prefix: str,
        single: dict[str, int],
        endings: set[str],
    ) -> None:
        self.tokenize = model.tokenize
        self.prefix = prefix
        self.single = {char: np.int32(id_).tobytes() for char, id_ in single.items()}
        self.endings = endings

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> _WordEncoder | None:
        """Look into a pipeline; None where it does more to such a word than prefix it."""
        import tokenizers

        ascii_text = ''.join(map(chr, range(33, 127)))
        if backend.normalizer is not None:
            for text in (ascii_text, *ascii_text):
                if backend.normalizer.normalize_str(text) != text:
                    return None
        ((word, _),) = backend.pre_tokenizer.pre_tokenize_str(ascii_text)
        if not word.endswith(ascii_text):
            return None
        unigram = isinstance(backend.model, tokenizers.models.Unigram)
        vocabulary = backend.get_vocab(with_added_tokens=False) if unigram else {}
        return cls(
            backend.model,
            word.removesuffix(ascii_text),
            {entry: id_ for entry, id_ in vocabulary.items() if len(entry) == 1},
            {entry[-2:] for entry in vocabulary if len(entry) > 1},
        )

    def __call__(self, word: str, table: dict[str, bytes]) -> bytes:
        known = table.get(word)
        if known is not None:
            return known
        last = self.single.get(word[-1])
        if last is not None and len(word) > 1 and word[-2:] not in self.endings:
            table[word[:-1]] = stem = self(word[:-1], table)
            return stem + last
        ids = [token.id for token in self.tokenize(self.prefix + word)]
        return np.array(ids, dtype=np.int32).tobytes()
