# SPDX-License-Identifier: Apache-2.0
import json
import os

import pytest

from asymloop_foundry.files import write_json, write_text


def test_a_file_is_replaced_whole_and_its_folder_made(tmp_path):
    path = tmp_path / 'a' / 'b.json'
    write_json(path, {'x': 1})
    write_json(path, {'x': 2})
    assert json.loads(path.read_text()) == {'x': 2}
    assert os.listdir(path.parent) == ['b.json']


def test_a_crash_while_writing_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / 'a.txt'
    write_text(path, 'old')

    def fail(*_):
        raise OSError('disk full')

    monkeypatch.setattr(os, 'fsync', fail)
    with pytest.raises(OSError, match='disk full'):
        write_text(path, 'new')
    assert path.read_text() == 'old'
    assert os.listdir(tmp_path) == ['a.txt']


def test_numbers_that_json_has_not_are_refused(tmp_path):
    with pytest.raises(ValueError, match='JSON'):
        write_json(tmp_path / 'a.json', {'x': float('nan')})
    assert not list(tmp_path.iterdir())
