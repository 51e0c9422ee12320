# SPDX-License-Identifier: Apache-2.0
"""What Foundry finds once this package is installed, and under which name.

The entry points of pyproject.toml lead here, so that a YAML can say ``model.name: asymloop_causal_lm``
with no import and no ``code_paths``.
"""

from torch.optim import AdamW as adamw  # noqa: N813 (the name is the registry's)

from asymloop_foundry.algorithms.alrs import ALRS as alrs  # noqa: N811
from asymloop_foundry.callbacks.hf_export import HFExport as hf_export  # noqa: N813
from asymloop_foundry.callbacks.iteration_losses import (
    IterationLosses as iteration_losses,  # noqa: N813
)
from asymloop_foundry.callbacks.results_writer import ResultsWriter as results_writer  # noqa: N813
from asymloop_foundry.callbacks.spectrum_monitor import (
    SpectrumMonitor as spectrum_monitor,  # noqa: N813
)
from asymloop_foundry.models.composer_asymloop import (
    ComposerAsymLoopCausalLM as asymloop_causal_lm,  # noqa: N813
)
from asymloop_foundry.preflight import preflight as asymloop_preflight

__all__ = [
    'adamw',
    'alrs',
    'asymloop_causal_lm',
    'asymloop_preflight',
    'hf_export',
    'iteration_losses',
    'results_writer',
    'spectrum_monitor',
]
