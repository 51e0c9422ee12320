# SPDX-License-Identifier: Apache-2.0
"""Ids are those of the whole text, whatever way they were come by."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tokenizers
from data.preparing import make_texts
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from asymloop_foundry.data.encoding import (
    DocumentEncoder,
    Encoder,
    boundary_pattern,
    describe,
    fingerprint,
    load_tokenizer,
)

# Around these a cut could go wrong: combining marks, joiners, exotic spaces, special tokens,
# contractions, runs of whitespace, characters that normalise to several or to a space.
AWKWARD = [
    'e\u0301 \u0301x a \u0301',
    '\u00e9\u0301 \u201cx\u201d \u2014\u0301 it\u2019s \u2026\u0301a \u0130 \u017f \u2019',
    'a\r\nb \r\n c\n\n\nd',
    'x\u00a0y\u2003z\u3000w \u200d v',
    '</s> a </s>b <pad> <|endoftext|> <extra_id_0>',
    "don't we'll 'tis  --  1,234.5 %",
    '\ufb01ne \uff11\uff12 \u00a8 \u2167',
    '\u0600 5 \u0915\u094d\u0937 \U0001f469\u200d\U0001f680 ok',
    ' leading',
    'trailing \n',
    '\u2581 lower \u2581one',
    '{"a": [1]}\t\x0b\x0c\x1c\x85 end',
    '',
    ' ',
    '\n',
]


def whole(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """The same by transformers, document by document."""
    return [
        tokenizer(text, add_special_tokens=False, split_special_tokens=True)['input_ids']
        for text in texts
    ]


def pieces(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    encoder = Encoder.of(tokenizer)
    assert encoder.pattern is not None
    return [ids.tolist() for ids in encoder.build()(texts)]


@pytest.mark.parametrize('name', ['t5', 'smollm'])
def test_ids_of_real_documents_equal_those_of_the_whole_text(
    name: str, request: pytest.FixtureRequest, data_dir: Path
) -> None:
    tokenizer = request.getfixturevalue(name)
    lines = (data_dir / 'fineweb_edu' / 'validation.jsonl').read_text().splitlines()
    texts = [json.loads(line)['text'] for line in lines]
    rare = pq.read_table(data_dir / 'fineweb_edu' / 'train.parquet')['text'].to_pylist()
    texts += [text for text in rare if not text.isascii()][:100]
    assert pieces(tokenizer, texts) == whole(tokenizer, texts)


@pytest.mark.parametrize('name', ['t5', 'smollm', 'bpe'])
def test_awkward_texts_too(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    joined = [left + between + right for left in AWKWARD for right in AWKWARD for between in ' \n']
    assert pieces(tokenizer, joined) == whole(tokenizer, joined)


@pytest.mark.parametrize('name', ['t5', 'smollm'])
def test_random_unicode_too(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    encode = Encoder.of(tokenizer).build()
    alphabet = st.one_of(
        st.sampled_from(
            list("ab,.'-1 \n\t\u0301\u200d\u00a0\u2581\u3000\r\u00e9\u0149\u2019\u201c\u2014\u2026")
        ),
        st.characters(blacklist_categories=('Cs',)),
    )

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(st.text(alphabet, max_size=40))
    def check(text: str) -> None:
        assert encode([text])[0].tolist() == whole(tokenizer, [text])[0]

    check()


def test_a_full_table_starts_afresh_and_changes_nothing(bpe: PreTrainedTokenizerBase) -> None:
    backend = bpe.backend_tokenizer
    small = DocumentEncoder(backend, boundary_pattern(backend.to_str()), table_limit=5)
    texts = make_texts(30)
    found = [ids.tolist() for text in texts for ids in small([text])]
    assert found == whole(bpe, texts)
    assert len(small.table) < 100


def test_special_tokens_in_a_text_are_plain_text(smollm: PreTrainedTokenizerBase) -> None:
    (ids,) = Encoder.of(smollm).build()(['before <|endoftext|> after <file_sep>'])
    assert not set(smollm.all_special_ids) & set(ids.tolist())
    assert smollm.decode(ids) == 'before <|endoftext|> after <file_sep>'
    assert ids.dtype == np.int32


@pytest.mark.parametrize(
    'pre_tokenizer',
    [
        tokenizers.pre_tokenizers.Whitespace(),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True),
        tokenizers.pre_tokenizers.Metaspace(prepend_scheme='first'),
        tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.WhitespaceSplit(),
                tokenizers.pre_tokenizers.Metaspace(prepend_scheme='first'),
            ]
        ),
        None,
    ],
)
def test_other_pipelines_are_encoded_whole(pre_tokenizer: object) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    assert boundary_pattern(backend.to_str()) is None


def test_tokens_that_match_across_words_forbid_cutting(bpe: PreTrainedTokenizerBase) -> None:
    backend = tokenizers.Tokenizer.from_str(bpe.backend_tokenizer.to_str())
    assert boundary_pattern(backend.to_str()) is not None
    backend.add_tokens(['two words'])
    assert boundary_pattern(backend.to_str()) is None
    encode = DocumentEncoder(backend, None)
    assert backend.token_to_id('two words') in encode(['now two words more'])[0]


def test_the_fingerprint_ignores_name_folder_and_pad_but_not_content(
    smollm: PreTrainedTokenizerBase, t5: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    smollm.save_pretrained(tmp_path / 'copy')
    copy = load_tokenizer(str(tmp_path / 'copy'), pad_token='<empty_output>')
    assert fingerprint(copy) == fingerprint(smollm) != fingerprint(t5)
    # Same vocabulary, other merges: the same entries, another tokenizer.
    spec = json.loads(smollm.backend_tokenizer.to_str())
    spec['model']['merges'] = spec['model']['merges'][:20000]
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    other = type(smollm)(tokenizer_object=backend, eos_token='<|endoftext|>')
    assert other.get_vocab() == smollm.get_vocab()
    assert fingerprint(other) != fingerprint(smollm)


def test_a_pad_token_of_the_vocabulary_can_be_chosen(data_dir: Path) -> None:
    folder = str(data_dir / 'tokenizers' / 'smollm-135m')
    tokenizer = load_tokenizer(folder, pad_token='<empty_output>')
    record = describe(tokenizer, folder)
    assert (record.pad_token, record.vocab_size) == ('<empty_output>', 49152)
    assert record.pad_id == AutoTokenizer.from_pretrained(folder).get_vocab()['<empty_output>']
    with pytest.raises(ValueError, match=r"pad_token='\[PAD\]' is not in the vocabulary.*reserved"):
        load_tokenizer(folder, pad_token='[PAD]')


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'tokenizer=.*nowhere.*folder that holds tokenizer.json'):
        load_tokenizer(str(tmp_path / 'nowhere'))
