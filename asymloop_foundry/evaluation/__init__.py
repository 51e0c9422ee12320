# SPDX-License-Identifier: Apache-2.0
"""Scores of trained models: lm-eval's seven tasks, Foundry's gauntlet and GSM8K."""
