# SPDX-License-Identifier: Apache-2.0
"""The model family; importable with torch and transformers alone (but for the Composer wrapper)."""
