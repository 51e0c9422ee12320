# SPDX-License-Identifier: Apache-2.0
"""The paper's experiments as data: arithmetic, runs, result tables and figures."""
