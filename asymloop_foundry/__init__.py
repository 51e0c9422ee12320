# SPDX-License-Identifier: Apache-2.0
"""Asymmetric Looped Transformers for MosaicML Composer and LLM-Foundry."""

__version__ = '0.1.0'
