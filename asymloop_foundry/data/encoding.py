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
import string
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

# Both patterns cut only beside printable ASCII, Latin letters, dashes and quotation marks, where
# neither a combining mark nor a normaliser that works on neighbours can reach across the cut.
_WESTERN = ''.join(
    chr(code)
    for first, last in (
        (0x21, 0x7E),
        (0xC0, 0x17F),
        (0x2010, 0x2015),
        (0x2018, 0x201F),
        (0x2026, 0x2026),
    )
    for code in range(first, last + 1)
)
_EDGE = f'[{re.escape(_WESTERN)}]'
_DROP_SPACE = rf'(?<={_EDGE})[ \n](?={_EDGE})'
_KEEP_SPACE = rf'(?<={_EDGE})(?=[ \n])'
_LOCAL_NORMALIZERS = {'Precompiled', 'NFC', 'NFD', 'NFKC', 'NFKD', 'Lowercase'}
_WORDS = 256


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
            words = list(filter(self.words.is_word, new))
            self.words.learn(words, self.table)
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
    """Encodes single words, many of them as one text: several times faster than each by itself.

    A word here is made of characters that the normaliser leaves alone and never joins to their
    neighbours, so that a space between two words separates their ids.

    Where no entry of a Unigram vocabulary ends in a word's last two characters, the last one
    stands by itself in every segmentation, and what precedes it is segmented as without it. So
    ``word,`` costs nothing where ``word`` is known.

    Args:
        backend: The tokenizer.
        alphabet: Characters of words.
        begins_V: Whether an entry of the vocabulary begins a word.
        single: Ids of one-character entries; empty for models other than Unigram.
        endings: Last two characters of longer entries.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        alphabet: str,
        begins_V: np.ndarray,
        single: dict[str, int],
        endings: set[str],
    ) -> None:
        self.backend = backend
        self.begins_V = begins_V
        self.is_word = re.compile(f'[{re.escape(alphabet)}]+').fullmatch
        self.single = {char: np.int32(id_).tobytes() for char, id_ in single.items()}
        self.endings = endings

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> _WordEncoder | None:
        """Look into a pipeline; None where it changes plain words or splits them."""
        import tokenizers

        def unchanged(text: str) -> bool:
            normalizer = backend.normalizer
            return normalizer is None or normalizer.normalize_str(text) == text

        alphabet = ''.join(filter(unchanged, _WESTERN))
        if not unchanged(alphabet) or not set(string.ascii_letters) <= set(alphabet):
            return None
        pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(f'{alphabet} a')]
        vocabulary = backend.get_vocab(with_added_tokens=False)
        if len(pieces) != 2 or not pieces[0].endswith(alphabet):
            return None
        prefix = pieces[0].removesuffix(alphabet)
        if pieces[1] != f'{prefix}a' or prefix in alphabet or prefix not in vocabulary:
            return None
        begins_V = np.zeros(max(backend.get_vocab().values()) + 1, dtype=bool)
        begins_V[[id_ for entry, id_ in vocabulary.items() if entry.startswith(prefix)]] = True
        unigram = vocabulary if isinstance(backend.model, tokenizers.models.Unigram) else {}
        return cls(
            backend,
            alphabet,
            begins_V,
            {entry: id_ for entry, id_ in unigram.items() if len(entry) == 1},
            {entry[-2:] for entry in unigram if len(entry) > 1},
        )

    def learn(self, words: list[str], table: dict[str, bytes]) -> None:
        """Adds words, and what they begin with, to a table."""
        lengths = [self._stem_length(word) for word in words]
        stems = {word[:length] for word, length in zip(words, lengths, strict=True)}
        unknown = list(stems.difference(table))
        chunks = [unknown[i : i + _WORDS] for i in range(0, len(unknown), _WORDS)]
        texts = [' '.join(chunk) for chunk in chunks]
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        for chunk, encoding in zip(chunks, encodings, strict=True):
            ids_T = np.array(encoding.ids, dtype=np.int32)
            starts = (4 * np.flatnonzero(self.begins_V[ids_T])).tolist()
            ids = ids_T.tobytes()
            for word, start, end in zip(chunk, starts, [*starts[1:], len(ids)], strict=True):
                table[word] = ids[start:end]
        for word, length in zip(words, lengths, strict=True):
            if length < len(word):
                rest = b''.join(self.single[char] for char in word[length:])
                table[word] = table[word[:length]] + rest

    def _stem_length(self, word: str) -> int:
        """Characters before those that stand by themselves at the word's end, at least one."""
        length = len(word)
        while length > 1 and word[length - 1] in self.single:
            if word[length - 2 : length] in self.endings:
                break
            length -= 1
        return length
