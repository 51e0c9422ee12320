# SPDX-License-Identifier: Apache-2.0
"""Composer callbacks: records of a run, and evaluation during training."""
