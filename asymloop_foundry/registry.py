# SPDX-License-Identifier: Apache-2.0
"""What Foundry finds once this package is installed, and under which name.

The entry points of pyproject.toml lead here, so that a YAML can say ``model.name: asymloop_causal_lm``
with no import and no ``code_paths``.
"""

from torch.optim import AdamW as adamw  # noqa: N813 (the name is the registry's)

from asymloop_foundry.models.composer_asymloop import (
    ComposerAsymLoopCausalLM as asymloop_causal_lm,  # noqa: N813
)
from asymloop_foundry.preflight import preflight as asymloop_preflight

__all__ = ['adamw', 'asymloop_causal_lm', 'asymloop_preflight']
