# SPDX-License-Identifier: Apache-2.0
"""Every number that the paper prints, as facts: nothing here is computed.

Scales are ``60m``, ``135m``, ``350m`` and ``1b``; systems are ``dense``, ``full-loop`` and ``asymloop``.
CE is the validation cross-entropy in nats per token, PPL its exponential.
"""

__all__ = [
    'ACCURACY_350M_35B',
    'ACCURACY_BY_SCALE',
    'ACCURACY_COLUMNS',
    'ADDITIONAL_VALIDATION',
    'ARCHITECTURES',
    'COMPONENT_ABLATIONS',
    'CONTEXT_ACCESS',
    'COST_AND_CE',
    'DEPTH_PPL',
    'DEPTH_PPL_EXPONENT',
    'FORWARD_GFLOPS',
    'FULL_LOOP_RATES',
    'GLOBAL_KV_CE',
    'GSM8K_ACCURACY',
    'LEARNING_RATE_ABLATIONS',
    'MOE_VALIDATION',
    'OLMO_VALIDATION',
    'STEP_GFLOPS',
    'Architecture',
]

from typing import NamedTuple


class Architecture(NamedTuple):
    """A column of Table 5, with the number of optimizer steps that its budget means.

    ``dense_millions`` and ``asymloop_millions`` are parameters as printed (1.34B and 1.44B at 1B);
    ``steps`` times 512 rows of 1,024 positions, padding included, is ``tokens``.
    """

    dense_millions: float
    asymloop_millions: float
    layers: int
    d_model: int
    d_ff: int
    n_heads: int
    tokens: float
    steps: int
    peak_lr: float


# Table 5.
ARCHITECTURES = {
    '60m': Architecture(91.8, 95.4, 6, 768, 2048, 6, 1.68e9, 3200, 1.0e-03),
    '135m': Architecture(134.3, 141.4, 12, 768, 2048, 12, 3.00e9, 5722, 1.0e-03),
    '350m': Architecture(368.2, 393.4, 24, 1024, 2736, 16, 7.00e9, 13351, 1.0e-03),
    '1b': Architecture(1340.0, 1440.0, 24, 2048, 5461, 32, 20.00e9, 38147, 5.0e-04),
}

# Tables 1 and 2: accuracy in per cent, by number of examples in the prompt.
ACCURACY_COLUMNS = (
    'obqa',
    'winogrande',
    'arc_challenge',
    'arc_easy',
    'hellaswag',
    'siqa',
    'piqa',
    'avg',
)

# fmt: off
ACCURACY_BY_SCALE = {
    0: {
        ('60m', 'dense'): (17.80, 50.83, 17.41, 45.33, 27.39, 34.54, 59.03, 36.05),
        ('60m', 'full-loop'): (16.80, 50.28, 20.22, 46.51, 27.14, 37.00, 58.71, 36.66),
        ('60m', 'asymloop'): (17.80, 50.59, 18.17, 47.31, 27.72, 36.49, 59.41, 36.79),
        ('135m', 'dense'): (18.80, 48.54, 21.42, 52.90, 29.06, 37.41, 61.53, 38.52),
        ('135m', 'full-loop'): (19.80, 51.85, 22.87, 51.52, 29.09, 38.69, 62.19, 39.43),
        ('135m', 'asymloop'): (22.00, 50.99, 22.35, 54.50, 30.22, 38.38, 61.97, 40.06),
        ('350m', 'dense'): (22.20, 53.35, 26.62, 59.39, 33.82, 39.15, 67.30, 43.12),
        ('350m', 'full-loop'): (24.80, 51.78, 25.77, 58.92, 34.57, 39.05, 66.38, 43.04),
        ('350m', 'asymloop'): (23.60, 52.41, 27.05, 62.12, 35.59, 39.20, 67.79, 43.97),
        ('1b', 'dense'): (28.40, 59.19, 33.96, 69.02, 41.47, 41.61, 71.49, 49.31),
        ('1b', 'full-loop'): (29.40, 57.77, 34.64, 68.64, 42.67, 42.53, 71.38, 49.58),
        ('1b', 'asymloop'): (32.40, 57.93, 36.69, 70.71, 44.34, 41.81, 72.03, 50.85),
    },
    5: {
        ('60m', 'dense'): (17.60, 49.57, 18.43, 42.93, 27.09, 34.54, 58.11, 35.47),
        ('60m', 'full-loop'): (15.40, 50.51, 20.48, 44.44, 27.27, 35.21, 58.32, 35.95),
        ('60m', 'asymloop'): (16.60, 51.70, 18.86, 45.71, 27.53, 36.13, 59.47, 36.57),
        ('135m', 'dense'): (18.00, 51.70, 22.35, 50.21, 28.75, 36.44, 61.64, 38.44),
        ('135m', 'full-loop'): (17.20, 52.09, 22.44, 50.72, 28.85, 38.33, 63.06, 38.96),
        ('135m', 'asymloop'): (21.20, 50.28, 23.46, 53.66, 30.03, 37.56, 62.95, 39.88),
        ('350m', 'dense'): (23.00, 53.28, 27.65, 59.93, 33.41, 39.00, 66.76, 43.29),
        ('350m', 'full-loop'): (21.20, 52.17, 26.88, 60.02, 34.33, 39.15, 66.92, 42.95),
        ('350m', 'asymloop'): (24.00, 54.38, 28.92, 64.48, 35.03, 40.69, 68.17, 45.10),
        ('1b', 'dense'): (24.20, 57.70, 36.35, 69.57, 41.07, 42.48, 71.60, 48.99),
        ('1b', 'full-loop'): (26.60, 58.25, 36.77, 70.54, 42.84, 43.09, 72.25, 50.05),
        ('1b', 'asymloop'): (29.00, 59.27, 38.99, 73.40, 44.06, 43.65, 71.76, 51.45),
    },
}
ACCURACY_350M_35B = {
    0: {
        'dense': (25.40, 54.70, 31.06, 66.33, 37.69, 39.61, 68.44, 46.18),
        'full-loop': (27.20, 53.43, 31.91, 66.20, 39.04, 41.40, 68.55, 46.82),
        'asymloop': (26.80, 55.80, 32.68, 68.35, 38.54, 40.02, 69.04, 47.32),
    },
    5: {
        'dense': (21.20, 54.54, 30.72, 67.00, 37.21, 41.20, 68.77, 45.81),
        'full-loop': (23.00, 56.51, 31.66, 66.50, 38.53, 41.50, 68.99, 46.67),
        'asymloop': (25.40, 56.67, 32.08, 68.56, 38.70, 41.50, 68.99, 47.41),
    },
}
# fmt: on

# Table 3: PPL by scale, system and K. The table is on a scale of its own: each value that another table
# also gives is exp(30/31 CE), what an evaluator that divides by one batch too many prints.
DEPTH_PPL_EXPONENT = 30 / 31
DEPTH_PPL = {
    ('60m', 'dense', 1): 23.72,
    ('60m', 'asymloop', 1): 21.79,
    ('60m', 'full-loop', 2): 23.03,
    ('60m', 'asymloop', 3): 21.45,
    ('60m', 'full-loop', 3): 22.77,
    ('60m', 'asymloop', 5): 21.30,
    ('135m', 'dense', 1): 17.46,
    ('135m', 'asymloop', 1): 16.54,
    ('135m', 'full-loop', 2): 17.12,
    ('135m', 'asymloop', 3): 16.14,
    ('135m', 'full-loop', 3): 16.81,
    ('135m', 'asymloop', 5): 16.09,
    ('350m', 'dense', 1): 12.55,
    ('350m', 'asymloop', 1): 12.20,
    ('350m', 'full-loop', 2): 12.30,
    ('350m', 'asymloop', 3): 12.00,
    ('350m', 'full-loop', 3): 12.15,
    ('350m', 'asymloop', 5): 11.92,
    ('1b', 'full-loop', 2): 8.91,
    ('1b', 'asymloop', 3): 8.86,
}

# Table 4a to 4c, at 60M: PPL by K.
COMPONENT_ABLATIONS = {
    'asymloop-alrs': {3: 23.751, 5: 23.580},
    'asymloop-uniform': {3: 24.727, 5: 24.619},
    'no-qk-norm': {3: 24.984, 5: 24.663},
    'no-global-kv': {3: 25.566, 5: 25.751},
    'no-local-kv': {3: 25.656, 5: 25.465},
    'no-global-kv-param-matched-ffn': {3: 25.339, 5: 25.323},
}
LEARNING_RATE_ABLATIONS = {
    'asymloop-alrs': {3: 23.751, 5: 23.580},
    'uniform': {3: 24.727, 5: 24.619},
    'lr-x0.5': {3: 24.059, 5: 23.826},
    'lr-x2': {3: 24.865, 5: 24.278},
    'lr-x4': {3: 26.181, 5: 25.941},
    'static-decoder-boost': {3: 24.785, 5: 24.708},
}
FULL_LOOP_RATES = {'uniform': 25.571, 'alrs': 24.787}

# Table 6, at 60M with QKNorm and a uniform LR: CE by K.
GLOBAL_KV_CE = {
    'asymloop': {1: 3.238735, 3: 3.207915, 5: 3.203515},
    'no-global-kv': {1: 3.260346, 3: 3.241257, 5: 3.248483},
}

# Table 7, at 60M with QKNorm and a uniform LR: PPL by system and K.
CONTEXT_ACCESS = {
    ('asymloop', 3): 24.727,
    ('no-global-kv', 3): 25.566,
    ('additive-injection', 3): 25.116,
    ('full-loop', 2): 25.053,
}

# Table 8, at 60M without QKNorm: CE and PPL by system, learning rates and K.
ADDITIONAL_VALIDATION = {
    ('dense', 'uniform', 1): (3.271820, 26.359274),
    ('dense', 'alrs', 1): (3.209192, 24.759083),
    ('full-loop', 'uniform', 2): (3.241455, 25.570904),
    ('full-loop', 'uniform', 3): (3.229346, 25.263120),
    ('asymloop', 'uniform', 3): (3.218239, 24.984094),
    ('asymloop', 'uniform', 5): (3.205305, 24.663015),
}

# Table 9: GFLOPs per token of a forward pass at N = 1024 (Full Loop K = 2, AsymLoop K = 3), and the share
# in per cent of Full Loop that Global projections, attention to Global keys and both add.
FORWARD_GFLOPS = {
    '60m': (0.256967, 0.292356, 2.75, 11.02, 13.77),
    '135m': (0.464585, 0.535364, 3.05, 12.19, 15.23),
    '350m': (1.476657, 1.677984, 3.41, 10.23, 13.63),
    '1b': (5.365891, 5.869208, 3.75, 5.63, 9.38),
}

# Table 10, on eight H100s: FFN width, parameters in millions, seconds per step, peak GiB, CE and its
# standard deviation over three seeds. Its CE follows a protocol of its own.
COST_AND_CE = {
    ('60m', 'full-loop'): (2048, 91.83, 0.232, 20.2, 3.04340, None),
    ('60m', 'full-loop-wide'): (2656, 100.23, 0.230, 21.6, 3.01390, None),
    ('60m', 'asymloop'): (2048, 95.37, 0.216, 21.7, 2.96840, None),
    ('135m', 'full-loop'): (2048, 134.30, 0.286, 30.9, 2.81550, 0.00221),
    ('135m', 'full-loop-wide'): (2656, 151.11, 0.296, 33.6, 2.78983, 0.00197),
    ('135m', 'asymloop'): (2048, 141.38, 0.367, 33.8, 2.74947, 0.00299),
}

# Table 11: measured matrix GFLOPs of a training step with recomputation, one row of 1,024 positions.
STEP_GFLOPS = {
    ('60m', 'asymloop'): 1134.878,
    ('60m', 'full-loop-wide'): 1108.907,
    ('135m', 'asymloop'): 2118.157,
    ('135m', 'full-loop-wide'): 2092.198,
}

# Table 12: CE and PPL of the OLMo-style backbone.
OLMO_VALIDATION = {
    'dense': (3.508664, 33.403615),
    'full-loop': (3.501389, 33.161466),
    'asymloop': (3.341073, 28.249416),
}

# Table 13: GSM8K accuracy in per cent at 1B.
GSM8K_ACCURACY = {'dense': 8.94, 'full-loop': 10.24, 'asymloop': 11.75}

# Table 14: CE and PPL with experts. Its CE follows a protocol of its own.
MOE_VALIDATION = {
    ('60m', 'dense'): (2.9856, 19.798),
    ('60m', 'full-loop'): (2.9363, 18.845),
    ('60m', 'asymloop'): (2.8986, 18.149),
    ('135m', 'dense'): (2.7489, 15.625),
    ('135m', 'full-loop'): (2.7154, 15.111),
    ('135m', 'asymloop'): (2.6690, 14.426),
}
