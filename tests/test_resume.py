# SPDX-License-Identifier: Apache-2.0
import pytest

from asymloop_foundry.resume import set_unfinished_checkpoints_aside


@pytest.fixture
def folder(tmp_path):
    checkpoints = tmp_path / 'mine' / 'checkpoints'
    checkpoints.mkdir(parents=True)
    for step in (2, 4, 10):
        (checkpoints / f'ep0-ba{step}-rank0.pt').write_text(str(step))
    return checkpoints


def config(tmp_path, **changes):
    folder = str(tmp_path / '{run_name}' / 'checkpoints')
    return {'autoresume': True, 'save_folder': folder, 'run_name': 'mine', **changes}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_beyond_latest_is_set_aside_and_kept(folder, tmp_path):
    (folder / 'latest-rank0.pt').symlink_to('ep0-ba4-rank0.pt')
    with pytest.warns(UserWarning, match='ep0-ba10-rank0.pt is newer'):
        set_unfinished_checkpoints_aside(config(tmp_path))
    assert names(folder) == [
        'ep0-ba2-rank0.pt',
        'ep0-ba4-rank0.pt',
        'latest-rank0.pt',
        'unfinished-ep0-ba10-rank0.pt',
    ]
    assert (folder / 'unfinished-ep0-ba10-rank0.pt').read_text() == '10'


def test_without_latest_every_checkpoint_is_unfinished(folder, tmp_path):
    with pytest.warns(UserWarning, match='is newer'):
        set_unfinished_checkpoints_aside(config(tmp_path))
    assert all(name.startswith('unfinished-') for name in names(folder))


@pytest.mark.parametrize(
    'changes', [{'autoresume': False}, {'save_folder': 's3://bucket/run'}, {'save_folder': None}]
)
def test_other_runs_are_left_alone(folder, tmp_path, changes):
    before = names(folder)
    set_unfinished_checkpoints_aside(config(tmp_path, **changes))
    assert names(folder) == before


def test_only_the_first_rank_renames(folder, tmp_path, monkeypatch):
    monkeypatch.setenv('RANK', '1')
    before = names(folder)
    set_unfinished_checkpoints_aside(config(tmp_path))
    assert names(folder) == before
