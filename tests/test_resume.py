# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that an accident left: which one a run resumes from, and what it says."""

import shutil
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp

from asymloop_foundry.resume import check_load_path, damage, prepare_to_resume

STEPS = (2, 4, 10)


def file_checkpoint(path, step):
    torch.save({'state': {'model': {'w': torch.full((64,), float(step))}}}, path)


def sharded_checkpoint(path, step):
    state = {'state': {'model': {'w': torch.full((64,), float(step))}, 'step': step}}
    dcp.save(state, checkpoint_id=path, no_dist=True)


@pytest.fixture
def folder(tmp_path):
    checkpoints = tmp_path / 'mine' / 'checkpoints'
    checkpoints.mkdir(parents=True)
    for step in STEPS:
        file_checkpoint(checkpoints / f'ep0-ba{step}-rank0.pt', step)
    (checkpoints / 'latest-rank0.pt').symlink_to('ep0-ba10-rank0.pt')
    return checkpoints


@pytest.fixture
def sharded(tmp_path):
    checkpoints = tmp_path / 'mine' / 'checkpoints'
    checkpoints.mkdir(parents=True)
    for step in STEPS:
        sharded_checkpoint(checkpoints / f'ep0-ba{step}', step)
    (checkpoints / 'latest-sharded-rank0').symlink_to('ep0-ba10')
    return checkpoints


def config(tmp_path, **changes):
    folder = str(tmp_path / '{run_name}' / 'checkpoints')
    return {'autoresume': True, 'save_folder': folder, 'run_name': 'mine', **changes}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def cut(path, keep):
    path.write_bytes(path.read_bytes()[:keep])


def cut_at(path, share):
    cut(path, int(path.stat().st_size * share))


def zeros(path):
    """What a lost machine leaves where the length was written and the content was not."""
    path.write_bytes(bytes(path.stat().st_size))


def without_its_values(path):
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('archive/version', '3')


def headless(path):
    """The end of the file alone, as a download that began in the middle leaves."""
    path.write_bytes(path.read_bytes()[200:])


FILE_DAMAGE = {
    'empty': (lambda path: cut(path, 0), 'it is empty'),
    'first byte alone': (lambda path: cut(path, 1), 'no table of contents'),
    'half': (lambda path: cut_at(path, 0.5), 'no table of contents'),
    'last byte missing': (lambda path: cut(path, -1), 'no table of contents'),
    'directory cut': (lambda path: cut(path, -40), 'no table of contents'),
    'zeros': (zeros, 'no table of contents'),
    'beginning lost': (headless, 'members are missing'),
    'text': (lambda path: path.write_text('<html>404</html>'), 'no table of contents'),
    'another archive': (without_its_values, r'without the data\.pkl'),
}
FOLDER_DAMAGE = {
    'no index': (lambda path: (path / '.metadata').unlink(), r'no \.metadata'),
    'empty index': (lambda path: cut(path / '.metadata', 0), 'cannot be read'),
    'half an index': (lambda path: cut_at(path / '.metadata', 0.5), 'cannot be read'),
    'file missing': (lambda path: (path / '__0_0.distcp').unlink(), '__0_0.distcp is missing'),
    'file cut': (lambda path: cut(path / '__0_0.distcp', -1), r'__0_0.distcp has [\d,]+ bytes'),
    'file empty': (lambda path: cut(path / '__0_0.distcp', 0), '__0_0.distcp has 0 bytes'),
}


@pytest.mark.parametrize('kind', FILE_DAMAGE)
def test_a_damaged_latest_file_falls_back_to_the_one_before(folder, tmp_path, kind):
    spoil, message = FILE_DAMAGE[kind]
    assert damage(folder / 'ep0-ba10-rank0.pt') is None
    spoil(folder / 'ep0-ba10-rank0.pt')
    left = (folder / 'ep0-ba10-rank0.pt').read_bytes()
    named = rf'ep0-ba10-rank0\.pt is not whole: .*{message}.*the one before, ep0-ba4-rank0\.pt'
    with pytest.warns(UserWarning, match=named):
        prepare_to_resume(config(tmp_path))
    assert (folder / 'latest-rank0.pt').resolve() == folder / 'ep0-ba4-rank0.pt'
    assert (folder / 'unfinished-ep0-ba10-rank0.pt').read_bytes() == left
    assert names(folder) == [
        'ep0-ba2-rank0.pt',
        'ep0-ba4-rank0.pt',
        'latest-rank0.pt',
        'unfinished-ep0-ba10-rank0.pt',
    ]


@pytest.mark.parametrize('kind', FOLDER_DAMAGE)
def test_a_damaged_latest_folder_falls_back_to_the_one_before(sharded, tmp_path, kind):
    spoil, message = FOLDER_DAMAGE[kind]
    assert damage(sharded / 'ep0-ba10') is None
    spoil(sharded / 'ep0-ba10')
    named = rf'ep0-ba10 is not whole: .*{message}.*the one before, ep0-ba4\.'
    with pytest.warns(UserWarning, match=named):
        prepare_to_resume(config(tmp_path))
    assert (sharded / 'latest-sharded-rank0').resolve() == sharded / 'ep0-ba4'
    assert (sharded / 'unfinished-ep0-ba10').is_dir()


def test_several_damaged_ones_are_named_each(folder, tmp_path):
    for step in (4, 10):
        cut_at(folder / f'ep0-ba{step}-rank0.pt', 0.5)
    with pytest.warns(UserWarning, match='the one before, ep0-ba2-rank0') as warned:
        prepare_to_resume(config(tmp_path))
    assert len(warned) == 2
    assert (folder / 'latest-rank0.pt').resolve() == folder / 'ep0-ba2-rank0.pt'


def test_without_a_whole_checkpoint_training_starts_anew_and_says_so(folder, tmp_path):
    for step in STEPS:
        cut_at(folder / f'ep0-ba{step}-rank0.pt', 0.5)
    with pytest.warns(UserWarning, match='training starts anew'):
        prepare_to_resume(config(tmp_path))
    assert all(name.startswith('unfinished-') for name in names(folder))


def test_a_part_written_beyond_latest_is_set_aside(folder, tmp_path):
    """A run killed while it wrote a checkpoint."""
    (folder / 'latest-rank0.pt').unlink()
    (folder / 'latest-rank0.pt').symlink_to('ep0-ba4-rank0.pt')
    cut_at(folder / 'ep0-ba10-rank0.pt', 0.9)
    with pytest.warns(UserWarning, match='ep0-ba10-rank0.pt is not whole'):
        prepare_to_resume(config(tmp_path))
    assert 'ep0-ba10-rank0.pt' not in names(folder)
    assert (folder / 'latest-rank0.pt').resolve() == folder / 'ep0-ba4-rank0.pt'


@pytest.mark.parametrize('latest', ['ep0-ba4-rank0.pt', 'ep0-ba2-rank0.pt', None])
def test_latest_is_brought_up_to_the_newest_whole_checkpoint(folder, tmp_path, latest, recwarn):
    """A run killed after the checkpoint was whole and before ``latest`` pointed to it."""
    (folder / 'latest-rank0.pt').unlink()
    if latest:
        (folder / 'latest-rank0.pt').symlink_to(latest)
    prepare_to_resume(config(tmp_path))
    assert (folder / 'latest-rank0.pt').resolve() == folder / 'ep0-ba10-rank0.pt'
    assert not recwarn.list


def test_a_sharded_run_gets_its_own_latest(sharded, tmp_path):
    (sharded / 'latest-sharded-rank0').unlink()
    prepare_to_resume(config(tmp_path))
    assert (sharded / 'latest-sharded-rank0').resolve() == sharded / 'ep0-ba10'


def test_a_second_accident_at_the_same_step_loses_nothing(folder, tmp_path):
    for content in ('first', 'second'):
        (folder / 'ep0-ba10-rank0.pt').write_text(content)
        with pytest.warns(UserWarning, match='ep0-ba10'):
            prepare_to_resume(config(tmp_path))
    assert (folder / 'unfinished-ep0-ba10-rank0.pt').read_text() == 'first'
    assert (folder / 'unfinished-ep0-ba10-rank0.pt.2').read_text() == 'second'


def test_whole_checkpoints_are_left_alone(folder, tmp_path, recwarn):
    before = names(folder)
    prepare_to_resume(config(tmp_path))
    assert names(folder) == before
    assert not recwarn.list


@pytest.mark.parametrize(
    'changes', [{'autoresume': False}, {'save_folder': 's3://bucket/run'}, {'save_folder': None}]
)
def test_other_runs_are_left_alone(folder, tmp_path, changes):
    cut_at(folder / 'ep0-ba10-rank0.pt', 0.5)
    before = names(folder)
    prepare_to_resume(config(tmp_path, **changes))
    assert names(folder) == before


def test_only_the_first_rank_renames(folder, tmp_path, monkeypatch):
    monkeypatch.setenv('RANK', '1')
    cut_at(folder / 'ep0-ba10-rank0.pt', 0.5)
    before = names(folder)
    prepare_to_resume(config(tmp_path))
    assert names(folder) == before


@pytest.mark.parametrize('kind', FILE_DAMAGE)
def test_a_damaged_load_path_is_refused_and_a_whole_one_named(folder, tmp_path, kind):
    spoil, message = FILE_DAMAGE[kind]
    path = folder / 'ep0-ba10-rank0.pt'
    spoil(path)
    cfg = {'load_path': str(path)}
    with pytest.raises(ValueError, match=rf'load_path=.*{message}.*ep0-ba4-rank0\.pt is whole'):
        check_load_path(cfg)
    with pytest.raises(ValueError, match=r'load_path=.*latest-rank0\.pt'):
        check_load_path({'load_path': str(folder / 'latest-rank0.pt')})


def test_a_sharded_load_path_is_checked_too(sharded):
    check_load_path({'load_path': str(sharded / 'ep0-ba4')})
    (sharded / 'ep0-ba4' / '.metadata').unlink()
    with pytest.raises(ValueError, match=r'load_path=.*ep0-ba4.*no \.metadata.*ep0-ba10 is whole'):
        check_load_path({'load_path': str(sharded / 'ep0-ba4')})


def test_a_load_path_that_is_not_there_is_named(folder):
    with pytest.raises(
        ValueError, match=r'load_path=.*ba5.* does not exist.*ba10-rank0\.pt is whole'
    ):
        check_load_path({'load_path': str(folder / 'ep0-ba5-rank0.pt')})


def test_a_load_path_that_latest_replaces_is_not_looked_at(folder, tmp_path):
    check_load_path(config(tmp_path, load_path='/gone'))
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match=r'load_path=./gone. does not exist'):
        check_load_path(config(tmp_path, load_path='/gone'))
