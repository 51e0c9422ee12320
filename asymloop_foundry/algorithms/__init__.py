# SPDX-License-Identifier: Apache-2.0
"""Composer Algorithms: ALRS, and the arithmetic, names and records that it stands on."""
