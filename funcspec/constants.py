"""Sentinels: neutral values that read nothing and write nothing, everywhere."""

PAD_SLOT = -1
"""Cache slot of a place that holds no token."""

NO_TOKEN = -1
"""A place without a token: a rejected or never drafted token, an unused place of a verdict."""

NO_ROW = -1
"""A batch row that belongs to no request."""
