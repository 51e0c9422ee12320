# SPDX-License-Identifier: Apache-2.0
import json
import re
from decimal import Decimal

import pytest

from asymloop_foundry.evaluation.gsm8k_answers import (
    final_number,
    last_number,
    reference_number,
    score,
)

MARKED = [
    ('so 18 in all.\n#### 18', '18'),
    ('so 18 in all. #### 18', '18'),  # T5 has no newline
    ('#### $29.00', '29'),
    ('#### 29.00', '29'),
    ('####29', '29'),
    ('#### 72, altogether', '72'),
    ('#### -3', '-3'),
    ('#### \u22123', '-3'),
    ('#### -$3', '-3'),
    ('#### $-3', '-3'),
    ('#### +3', '3'),
    ('#### 1,234.', '1234'),
    ('#### 1,234,567.50', '1234567.5'),
    ('#### 1234', '1234'),
    ('#### 50%', '50'),
    ('#### 50 %', '50'),
    ('#### .5', '0.5'),
    ('#### 0.50 dollars', '0.5'),
    ('#### 12 #### 13', '12'),
    ('#### 007', '7'),
    ('#### unknown. #### 4', '4'),
    ('####\n\n 5', '5'),
    ('#### 72</s>', '72'),
    ('#### 1,2', '1'),
    ('#### 1,2345', '1'),
    ('#### 99999999999999999999.00', '99999999999999999999'),
]
UNMARKED = [
    '',
    'The answer is 18.',
    '####',
    '#### ',
    '#### none',
    '### 18',
    '#### #### x',
    '#### $',
]


@pytest.mark.parametrize(('text', 'number'), MARKED)
def test_the_first_marked_number_is_read(text, number):
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize('text', UNMARKED)
def test_without_a_marked_number_there_is_no_answer_and_it_counts_as_wrong(text):
    assert final_number(text) is None
    assert not score(text, '#### 7').strict


@pytest.mark.parametrize(('text', 'number'), [
    ('She pays 3 + 4 = 7 dollars.', '7'),
    ('She pays $1,234.50.', '1234.5'),
    ('It fell to -3', '-3'),
    ('It fell by $-3', '-3'),
    ('between 5-10', '10'),
    ('(8)-2', '2'),
    ('72, altogether', '72'),
    ('no number', None),
])  # fmt: skip
def test_the_last_number_is_what_is_left_without_a_mark(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


def test_flexible_prefers_the_mark_and_strict_needs_it():
    assert score('#### 7 or 8', '#### 7').strict
    assert score('#### 7 or 8', '#### 7').flexible
    assert not score('It is 7', '#### 7').strict
    assert score('It is 7', '#### 7').flexible
    assert not score('It is 7', '#### 70').flexible


def test_a_reference_without_a_number_is_an_error():
    with pytest.raises(ValueError, match='has no number behind'):
        reference_number('seven')


@pytest.mark.parametrize(('name', 'rows'), [('train', 7473), ('test', 1319)])
def test_every_reference_parses_as_the_data_sets_own_rule_reads_it(data_dir, name, rows):
    path = data_dir / 'gsm8k' / f'{name}.jsonl'
    answers = [json.loads(line)['answer'] for line in path.read_text().splitlines()]
    assert len(answers) == rows
    for answer in answers:
        (official,) = re.findall(r'#### (-?[0-9.,]+)', answer)
        assert reference_number(answer) == Decimal(official.replace(',', ''))
        assert score(answer, answer).strict
