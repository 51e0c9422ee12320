# SPDX-License-Identifier: Apache-2.0
"""Data preparation, and what training must refuse before the first step."""
