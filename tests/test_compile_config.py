# SPDX-License-Identifier: Apache-2.0
"""``compile_config`` in a training YAML."""

from pathlib import Path

import pytest
from tiny_runs import launch, overrides, validation


@pytest.mark.slow
def test_a_compiled_run_has_the_losses_of_an_eager_one(text_run: Path, tmp_path: Path) -> None:
    losses = {}
    for name, changes in (('eager', {}), ('compiled', {'compile_config': '{}'})):
        folder = tmp_path / name
        folder.mkdir()
        launch('llmfoundry', overrides(text_run, folder, max_duration='2ba', **changes), cwd=folder)
        losses[name] = validation(folder)
    assert losses['eager'].keys() == losses['compiled'].keys() != set()
    for step, loss in losses['eager'].items():
        assert losses['compiled'][step] == pytest.approx(loss, rel=1e-5)
