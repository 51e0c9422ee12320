# SPDX-License-Identifier: Apache-2.0
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from asymloop_foundry.evaluation.tokenizers import adds_special_tokens, without_special_tokens


@pytest.fixture(scope='module')
def reloaded(t5_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp('tokenizer')
    without_special_tokens(t5_tokenizer).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_a_reloaded_tokenizer_closes_no_text_with_eos(t5_tokenizer, reloaded):
    assert adds_special_tokens(t5_tokenizer)
    assert not adds_special_tokens(reloaded)
    assert reloaded('')['input_ids'] == []


def test_it_gives_the_same_tokens_and_the_same_text_back(t5_tokenizer, reloaded, data_dir):
    rows = pq.read_table(data_dir / 'hub_schema/hellaswag/validation.parquet').to_pylist()
    for row in rows[:200]:
        text = f'{row["ctx"]} </s> <extra_id_7> {{x}}\n  {row["endings"][0]}'
        ids = t5_tokenizer(text, add_special_tokens=False)['input_ids']
        assert reloaded(text)['input_ids'] == ids
        assert reloaded.decode(ids) == t5_tokenizer.decode(ids)


def test_special_tokens_keep_their_roles(t5_tokenizer, reloaded):
    for role in ('eos_token_id', 'pad_token_id', 'unk_token_id', 'all_special_ids'):
        assert getattr(reloaded, role) == getattr(t5_tokenizer, role)
    assert len(reloaded) == len(t5_tokenizer)


def test_a_tokenizer_that_adds_nothing_is_left_alone(reloaded):
    assert without_special_tokens(reloaded) is reloaded
