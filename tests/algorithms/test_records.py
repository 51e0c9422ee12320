# SPDX-License-Identifier: Apache-2.0
import pytest

from asymloop_foundry.algorithms.records import RecordFile, read_records


def write(path, batches, start=0):
    record = RecordFile(path, start)
    for batch in batches:
        record.add({'kind': 'x', 'batch': batch, 'start': start})
    record.flush()


def test_a_resumed_record_drops_what_is_made_again(tmp_path):
    path = tmp_path / 'r.jsonl'
    write(path, range(6))
    write(path, range(4, 8), start=4)
    rows = read_records(path)
    assert [row['batch'] for row in rows] == list(range(8))
    assert [row['start'] for row in rows] == [0] * 4 + [4] * 4


def test_a_new_run_begins_a_new_record(tmp_path):
    path = tmp_path / 'r.jsonl'
    write(path, range(6))
    write(path, range(2))
    assert len(read_records(path)) == 2


def test_a_file_is_whole_or_absent(tmp_path):
    path = tmp_path / 'deep' / 'r.jsonl'
    record = RecordFile(path, 0)
    record.flush()
    assert not path.exists()
    record.add({'batch': 0, 'bad': float('nan')})
    with pytest.raises(ValueError, match='not JSON compliant'):
        record.flush()
    assert not path.exists()


def test_many_rows_are_written_before_the_end(tmp_path):
    path = tmp_path / 'r.jsonl'
    record = RecordFile(path, 0)
    for batch in range(150):
        record.add({'batch': batch})
    assert len(read_records(path)) == 100
