# SPDX-License-Identifier: Apache-2.0
"""Rows hold every document once, with one EOS, and account for every token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data.preparing import make_texts, prepare, read_rows, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from asymloop_foundry.data.rows import end_documents, pack_tokens, pad_documents

EOS, PAD = 1, 0
DOCUMENTS = st.lists(st.lists(st.integers(2, 50), max_size=12), max_size=8)


def arrays(documents: list[list[int]]) -> list[np.ndarray]:
    return [np.array(ids, dtype=np.int32) for ids in documents]


@settings(deadline=None, derandomize=True, database=None)
@given(DOCUMENTS, st.integers(2, 9))
def test_padded_rows_are_documents_cut_ended_and_filled(
    documents: list[list[int]], seq_len: int
) -> None:
    ids, kept, full = end_documents(arrays(documents), EOS, PAD, 'padded', seq_len)
    rows = pad_documents(ids, kept, seq_len, PAD).tolist()
    expected = [[*ids[: seq_len - 1], EOS] for ids in documents if ids]
    assert rows == [row + [PAD] * (seq_len - len(row)) for row in expected]
    assert full.tolist() == [len(ids) + 1 if ids else 0 for ids in documents]


@settings(deadline=None, derandomize=True, database=None)
@given(DOCUMENTS, st.integers(2, 9), st.integers(1, 3))
def test_packed_rows_end_to_end_are_the_documents_joined_by_eos(
    documents: list[list[int]], seq_len: int, batch: int
) -> None:
    rows: list[int] = []
    carried = np.zeros(0, dtype=np.int32)
    for start in range(0, len(documents), batch):
        ids, _, _ = end_documents(
            arrays(documents[start : start + batch]), EOS, PAD, 'packed', seq_len
        )
        cut, carried = pack_tokens(carried, ids, seq_len)
        assert len(carried) < seq_len
        rows += cut.ravel().tolist()
    assert rows + carried.tolist() == [token for ids in documents if ids for token in [*ids, EOS]]


def test_a_row_is_what_the_reference_makes_of_a_document(
    t5: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """T5 appends its own ``</s>``, also behind a truncated document; so do we, once."""
    texts = make_texts(40)
    prepare(t5, [write_jsonl(tmp_path / 'a.jsonl', texts)], tmp_path, seq_len=64)
    reference = t5(texts, max_length=64, truncation=True, padding='max_length')['input_ids']
    assert any(row[-1] == t5.eos_token_id for row in reference)
    assert read_rows(tmp_path / 'train') == reference


@pytest.mark.parametrize('name', ['t5', 'smollm'])
def test_packed_documents_end_in_one_eos_whatever_the_tokenizer_adds(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    tokenizer = request.getfixturevalue(name)
    tokenizer.pad_token = tokenizer.pad_token or '<empty_output>'
    texts = [*make_texts(40), 'a literal </s> and <|endoftext|> in a text']
    source = write_jsonl(tmp_path / 'a.jsonl', texts)
    manifest = prepare(tokenizer, [source], tmp_path, row_format='packed', seq_len=32)
    ids = []
    for text in texts:
        own = tokenizer(text, add_special_tokens=False, split_special_tokens=True)['input_ids']
        ids += [token for token in own if token != tokenizer.eos_token_id]
        ids.append(tokenizer.eos_token_id)
    rows = read_rows(tmp_path / 'train')
    flat = [token for row in rows for token in row]
    assert flat == ids[: len(flat)]
    assert len(ids) - len(flat) == manifest.counts.tokens_dropped < 32
    assert manifest.counts.tokens_produced == len(ids)
    assert ids.count(tokenizer.eos_token_id) == len(texts)


@pytest.mark.parametrize('row_format', ['padded', 'packed'])
def test_totals_reconcile_at_every_sequence_length(
    row_format: str, bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    texts = [*make_texts(100), '', '   ']
    source = write_jsonl(tmp_path / 'a.jsonl', texts)
    produced = set()
    for seq_len in (16, 32, 200):
        counts = prepare(
            bpe, [source], tmp_path / str(seq_len), row_format=row_format, seq_len=seq_len
        ).counts
        rows = np.array(read_rows(tmp_path / str(seq_len) / 'train'))
        real = rows != bpe.pad_token_id
        produced.add(counts.tokens_produced)
        assert counts.tokens_produced == counts.tokens_kept + counts.tokens_dropped
        assert rows.shape == (counts.rows, seq_len)
        assert real.sum() == counts.tokens_kept
        assert (~real).sum() == counts.tokens_padded
        assert (rows == bpe.eos_token_id).sum() == counts.eos_kept
        assert counts.documents_read == 102
    assert len(produced) == 1


def test_documents_that_only_the_dropped_tail_held_are_not_counted_as_written(
    bpe: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    lengths = [len(bpe('ab')['input_ids']) + 1] * 5
    source = write_jsonl(tmp_path / 'a.jsonl', ['ab'] * 5)
    for seq_len, whole, partly in ((lengths[0] * 2, 4, 4), (lengths[0] * 4 - 1, 3, 4)):
        out = tmp_path / str(seq_len)
        counts = prepare(bpe, [source], out, row_format='packed', seq_len=seq_len).counts
        assert (counts.eos_kept, counts.documents_written) == (whole, partly)


@pytest.mark.parametrize('row_format', ['padded', 'packed'])
def test_an_eos_or_pad_inside_a_document_is_left_out(row_format: str) -> None:
    documents = arrays([[5, EOS, 6, PAD], [EOS], [7]])
    ids, kept, full = end_documents(documents, EOS, PAD, row_format, 8)
    assert ids.tolist() == [5, 6, EOS, 7, EOS]
    assert kept.tolist() == full.tolist() == [3, 0, 2]
